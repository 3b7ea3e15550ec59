# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The one exception that the modules of this collection turn into a failure message."""

from __future__ import annotations


class InferenceError(Exception):
    """Something that a person has to put right.

    Args:
        subject: The option or file that is wrong, e.g. ``python`` or ``flashinfer/jit/comm.py:61``.
        found: What was found there.
        expected: What was expected instead.
        remedy: What to do, as an imperative sentence; optional where ``expected`` says it all.
    """

    def __init__(self, subject: str, found: str, expected: str, remedy: str = "") -> None:
        message = f"{subject}: {found}; expected {expected}."
        super().__init__(f"{message} {remedy}" if remedy else message)
