# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The variables of a role are the same, with the same defaults, wherever they are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROLES = sorted((Path(__file__).resolve().parents[3] / "roles").iterdir())


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_defaults_are_specified_and_documented(role):
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text()) or {}
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]
    assert {name: option["default"] for name, option in options.items() if "default" in option} == defaults
    assert all(option.get("required") for name, option in options.items() if name not in defaults)
    documented = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", (role / "README.md").read_text(), re.MULTILINE)
    told = {name: yaml.safe_load(value) if "{{" not in value else value for name, value in documented if name in options}
    assert told == {name: defaults.get(name, "required") for name in options}
