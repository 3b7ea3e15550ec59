# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Template variables of a role, and of files that come after it, as Ansible does.

One question a line: [variable, {name: value}], and one answer a line.

A program of its own, since Ansible's loader of collections takes the imports of its process over.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar


def main(role: Path, *files: Path) -> None:
    init_plugin_loader()
    loader = DataLoader()
    variables = {"playbook_dir": str(role.parents[1] / "playbooks")}
    for path in (role / "defaults/main.yml", role / "vars/main.yml", *files):
        variables.update(loader.load_from_file(str(path), trusted_as_template=True))
    for line in sys.stdin:
        variable, more = json.loads(line)
        answer = Templar(loader=DataLoader(), variables={**variables, **more}).resolve_variable_expression(variable)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
