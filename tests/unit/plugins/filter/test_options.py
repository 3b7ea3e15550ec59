# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which variables are taken for misspelt options."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.blackwell.inference.plugins.filter.options import misspelt

KNOWN = [
    name
    for path in Path(__file__).parents[4].glob("roles/*/meta/argument_specs.yml")
    for name in yaml.safe_load(path.read_text())["argument_specs"]["main"]["options"]
]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sglang_server_alreduce", "sglang_server_allreduce"),
        ("sglang_server_pyhton", "sglang_server_python"),
        ("sglang_server_argument", "sglang_server_arguments"),
        ("sglang_server_arguments", None),
        ("sglang_server_model_dir", None),
        ("server_alreduce", None),
        ("jit_cache_alreduce", None),
    ],
)
def test_near_names_with_the_prefix_are_misspelt(name, nearest):
    assert misspelt([name], KNOWN, "sglang_server_") == ({name: nearest} if nearest else {})
