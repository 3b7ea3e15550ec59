# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the pages say exists: the files and headings that they link to, and the options that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "roles").glob("*/README.md"), *(ROOT / "tests").glob("*/README.md")]
OURS = re.compile(r"https://(?:github|raw\.githubusercontent)\.com/blackwell-inference/blackwell\.inference/(?:(?:blob|tree)/)?main/")


def target(page: Path, link: str) -> tuple[Path, str]:
    """The file that a link of a page leads to, and the heading in it."""
    path, _hash, heading = link.partition("#")
    if OURS.match(path):
        return ROOT / OURS.sub("", path), heading
    return page.parent / path if path else page, heading


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()) if OURS.match(link) or not link.startswith("http")]
    for path, heading in (target(page, link) for link in links):
        assert path.exists(), path
        assert not heading or heading in headings(path), f"{path}#{heading}"


def test_every_option_that_is_named_is_one():
    options, files = set(), [*(ROOT / "roles").glob("*/meta/argument_specs.yml")]
    for file in files:
        options |= yaml.safe_load(file.read_text())["argument_specs"]["main"]["options"].keys()
    roles = "|".join(file.parents[1].name for file in files)
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        named = re.findall(rf"\b(?:{roles})_\w+(?=`?: |=)", page.read_text())  # set to something
        assert set(named) <= options, page
