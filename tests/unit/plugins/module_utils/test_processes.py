# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._processes import belongs, of_unit


@pytest.mark.parametrize(
    ("groups", "ours"),
    [
        ("0::/system.slice/sglang.service\n", True),
        ("0::/system.slice/sglang.service/ranks\n", True),  # a unit may have groups of its own
        ("4:memory:/system.slice/sglang.service\n1:name=systemd:/\n", True),
        ("0::/system.slice/second-sglang.service\n", False),
        ("0::/user.slice/user-0.slice/session-1.scope\n", False),
        ("", False),
    ],
)
def test_the_unit_of_a_process(groups, ours):
    assert belongs(groups, "sglang.service") is ours


def test_a_unit_that_does_not_run_has_no_processes():
    assert of_unit("nothing-of-that-name.service") == set()
