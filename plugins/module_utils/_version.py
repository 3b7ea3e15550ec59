# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The version of this collection, as galaxy.yml has it; a module cannot read that file on the target."""

from __future__ import annotations

COLLECTION_VERSION = "0.3.0"
