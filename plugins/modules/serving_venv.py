#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: serving_venv
short_description: Install pinned packages into a venv, and keep a lock of all that came with them
version_added: 0.2.0
author: ["blackwell.inference contributors (@blackwell-inference)"]
description:
  - Makes a venv and installs the named releases into it, with C(uv) where the host has it and with C(pip) otherwise.
  - Afterwards the version of everything in the venv is written into a lock. While the pins stay the same and what the lock names is
    installed, nothing is done, whatever newer releases there are.
  - Where something that the lock names is not installed in its version, it is installed from the lock. A lock that is copied to
    other hosts beforehand makes their venvs the same.
  - New pins are resolved anew, and what they need is installed over what is there. Packages that nothing asks for any more stay. The
    lock before stays beside the new one, with C(.previous) appended; with its pins again, what it names comes back in its version.
  - Files that M(blackwell.inference.gate) has edited in a package go with its old version; run that module afterwards.
  - Nothing is installed while a server of this venv runs, since it may import more of the packages later.
attributes:
  check_mode:
    support: full
    description:
      - Says which of the pinned or locked packages would be installed; which others come with them, only a run can say.
      - Lets the installer resolve them, where the venv is there and its installer can (uv, or pip from 22.2 on).
  diff_mode:
    support: full
    description: Shows the versions of these packages before and after.
  platform:
    platforms: linux
    support: full
    description: Hosts with Python 3.9 or newer.
options:
  path:
    description: Path of the venv. It is made where it is missing.
    type: path
    required: true
  packages:
    description: Requirements with exact versions, for example V(sglang==0.5.18).
    type: list
    elements: str
    required: true
  lock:
    description:
      - Path of the lock. Default is O(path) with C(.lock) appended.
      - Remove it and the one before, C(LOCK.previous), to have the same pins resolved again.
    type: path
  base_python:
    description: Name or path of the interpreter that a missing venv is made with. C(uv) also takes a version, such as V(3.12).
    type: str
    default: python3
  installer:
    description: Which program installs. V(auto) is C(uv) where the host has it.
    type: str
    choices: [auto, uv, pip]
    default: auto
  extra_args:
    description:
      - Arguments for C(uv pip install) or C(pip install), for example an index.
      - Addresses with credentials are refused; put these into C(~/.netrc).
      - A change of them alone installs nothing.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that making the venv, and installing, may take each.
    type: int
    default: 3600
  unit:
    description: Unit of the server that is stopped before anything is installed. In check mode, its processes are not in the way.
    type: str
    version_added: 0.3.0
seealso:
  - module: blackwell.inference.gate
"""

EXAMPLES = r"""
- name: Install SGLang and its FlashInfer
  blackwell.inference.serving_venv:
    path: /opt/sglang/venv
    packages: [sglang==0.5.18, flashinfer-python==0.6.17]

- name: Install for CUDA 12.8 from an index of its own
  blackwell.inference.serving_venv:
    path: /opt/sglang/venv
    packages: [sglang==0.5.18]
    extra_args: [--extra-index-url, "https://download.pytorch.org/whl/cu128"]
"""

RETURN = r"""
python:
  description: The interpreter of the venv.
  returned: success
  type: str
  sample: /opt/sglang/venv/bin/python
lock:
  description: The path of the lock.
  returned: success
  type: str
  sample: /opt/sglang/venv.lock
installer:
  description: The program that installed, or would in check mode; V(null) where there was nothing to install.
  returned: success
  type: str
  sample: uv
in_use:
  description: Whether, in check mode, O(unit) runs from the venv and something would be installed.
  returned: success
  type: bool
  sample: false
packages:
  description: What is installed; in check mode, before anything would be.
  returned: success
  type: dict
  sample: {"flashinfer-python": "0.6.17", "sglang": "0.5.18"}
"""

import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _serving_venv as serving_venv
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._processes import of_unit
from ansible_collections.blackwell.inference.plugins.module_utils._starting_servers import refuse_running_server


def run(module: AnsibleModule) -> dict:
    """Bring the venv to what is asked for, or in check mode say what that would take."""
    params = module.params
    path, lock_path = os.path.abspath(params["path"]), params["lock"] or os.path.abspath(params["path"]) + ".lock"
    pins, asked = serving_venv.parse_pins(params["packages"]), sorted(package.strip() for package in params["packages"])
    serving_venv.refuse_credentials(params["extra_args"])
    python, previous = os.path.join(path, "bin", "python"), f"{lock_path}.previous"
    if os.path.isdir(path) and os.listdir(path) and not os.path.exists(python):
        raise InferenceError("path", f"{path} holds no bin/python", "a venv, or a path that is free")
    locked, lock = serving_venv.find_lock([lock_path, previous], asked)
    before, wanted = serving_venv.installed(path), lock.versions if lock else pins
    missing = serving_venv.missing(wanted, before)
    result = {"changed": False, "python": python, "lock": lock_path, "installer": None, "packages": before, "in_use": False}
    if locked == lock_path and not missing and os.path.exists(python):
        return {**result, "diff": diff(path, before, before, wanted)}
    installer = serving_venv.find_installer(params["installer"], path, params["base_python"])
    # The lock names everything, so nothing is looked for beyond it. uv takes the flag once only.
    no_deps = ["--no-deps"] if locked and "--no-deps" not in params["extra_args"] else []
    arguments = [*params["extra_args"], *no_deps, *(["--requirement", locked] if locked else asked)]
    after = {**before, **missing}
    if module.check_mode:
        result["in_use"] = predict(module, installer, path, arguments)
    else:
        install(module, installer, path, arguments)
        after = result["packages"] = serving_venv.installed(path)
        for name, version in serving_venv.missing(wanted, after).items():
            found = f"{name} {after.get(name, 'is not there')} after installing {name}=={version}"
            raise InferenceError("packages", found, "that version, as its own metadata writes it")
        if locked != lock_path:
            if os.path.exists(lock_path):
                with open(lock_path, encoding="utf-8") as file:
                    write(module, previous, file.read())
            write(module, lock_path, serving_venv.render_lock(path, serving_venv.Lock(asked, after)))
    return {**result, "changed": True, "installer": installer.name, "diff": diff(path, before, after, wanted)}


def predict(module: AnsibleModule, installer: serving_venv.Installer, path: str, arguments: list[str]) -> bool:
    """Fail where installing would, as far as that can be known without; return whether the unit has to be stopped before."""
    stopped = of_unit(module.params["unit"]) if module.params["unit"] else set()
    in_use = False
    for site in serving_venv.sites(path):
        in_use |= refuse_running_server(site, stopped)
        if serving_venv.can_resolve(installer, serving_venv.installed(path)):
            what = f"resolving for {path} with {installer.name}"
            serving_venv.run([*installer.install, "--dry-run", *arguments], what, module.params["timeout"])
    return in_use


def install(module: AnsibleModule, installer: serving_venv.Installer, path: str, arguments: list[str]) -> None:
    """Make the venv where it is missing, and install into it."""
    timeout, parent = module.params["timeout"], os.path.dirname(path)
    os.makedirs(parent, mode=0o755, exist_ok=True)
    with serving_venv.alone(parent):
        for site in serving_venv.sites(path):
            refuse_running_server(site)
        if not os.path.exists(os.path.join(path, "bin", "python")):
            make(installer, path, timeout)
        serving_venv.run([*installer.install, *arguments], f"installing into {path} with {installer.name}", timeout)


def make(installer: serving_venv.Installer, path: str, timeout: float) -> None:
    """Make the venv; leave nothing of one that could not be made."""
    try:
        serving_venv.run([*installer.create, path], f"making {path} with {installer.name}", timeout)
    except InferenceError:
        shutil.rmtree(path, ignore_errors=True)
        raise


def write(module: AnsibleModule, path: str, text: str) -> None:
    """Put a file in place of another one, whole."""
    with tempfile.NamedTemporaryFile("w", dir=module.tmpdir, delete=False, encoding="utf-8") as draft:
        draft.write(text)
    module.atomic_move(draft.name, path)
    os.chmod(path, 0o644)


def diff(path: str, before: dict, after: dict, names: dict) -> dict:
    """Show the versions of these packages before and after."""
    texts = ["".join(f"{name}=={found[name]}\n" for name in sorted(names) if name in found) for found in (before, after)]
    return {"before_header": path, "after_header": path, "before": texts[0], "after": texts[1]}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "packages": {"type": "list", "elements": "str", "required": True},
            "lock": {"type": "path"},
            "base_python": {"type": "str", "default": "python3"},
            "installer": {"type": "str", "choices": ["auto", "uv", "pip"], "default": "auto"},
            "extra_args": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 3600},
            "unit": {"type": "str"},
        },
        supports_check_mode=True,
    )
    try:
        result = run(module)
    except InferenceError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename}: {error.strerror}; expected a path that this task may write.")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
