#!/usr/bin/python
# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: jit_cache
short_description: Clear and prebuild FlashInfer's JIT modules where a server really keeps them
version_added: 0.1.0
author: ["blackwell.inference contributors (@blackwell-inference)"]
description:
  - FlashInfer compiles its CUDA modules on first use and keeps them in a cache. A module that was built from other sources or with
    other flags than the installed ones is not always noticed, so it has to be removed after such a change.
  - Left to the server, every rank finds the module missing and they wait for minutes inside a start timeout. Built here, one process
    compiles it with as many compilers as the memory allows, before the server starts.
  - Finds the cache as the server does, from the packages in its venv, its user and its environment. From sglang 0.5.18 on that is
    C(~/.cache/sglang/.cache/flashinfer), before that C(~/.cache/flashinfer), unless E(FLASHINFER_WORKSPACE_BASE) says otherwise.
  - Looks only at the installed FlashInfer version; caches of other versions are never used by it and stay.
  - The cache folder may be a symlink to another disk. Within it no symlink is followed, and a module that is one is unlinked.
attributes:
  check_mode:
    support: full
    description:
      - Says what would be removed and built, and fails where a run would.
      - A gate, a user or a folder that is not there yet is a warning, because an earlier task of a run may see to it.
  diff_mode:
    support: full
    description: Lists what is removed, with its size, and what is built, with its architectures.
  platform:
    platforms: linux
    support: full
    description: Uses C(/proc) to see who uses the cache.
options:
  state:
    description:
      - With V(absent), the modules are not in the cache; the next server start builds them. A prebuilt library that O(prebuilt) had
        set aside for them is put back.
      - With V(built), the modules are in the cache, for exactly the architectures that the server would build them for, and made from
        the installed sources with the installed toolchain. A fingerprint of these is kept in the folder of the module; while nothing
        has changed, nothing is cleared and nothing is built.
      - A module that a server built carries no fingerprint. It counts as built if its flags are the expected ones, C(ninja) finds
        nothing to do, and no file that it was made from has been replaced since, whatever date that file carries.
    type: str
    choices: [absent, built]
    default: absent
  python:
    description:
      - Path of the serving venv's interpreter. With O(state=built), it compiles, as O(user).
      - One of O(python) and O(site_packages) is required.
    type: path
  site_packages:
    description: Path of the serving venv's site-packages folder; of use with O(state=absent) only.
    type: path
  user:
    description:
      - The user that the server runs as. Its home folder counts where O(environment) has no E(HOME).
      - Default is the user that the module runs as.
    type: str
  environment:
    description:
      - The environment of the server, as its unit sets it. It decides where the cache lies (E(HOME), E(FLASHINFER_WORKSPACE_BASE),
        E(SGLANG_CACHE_DIR)) and how modules are built (E(PATH), E(CUDA_HOME), E(FLASHINFER_CUDA_ARCH_LIST),
        E(FLASHINFER_EXTRA_LDFLAGS) and others).
      - Leave secrets out; a build needs none, and the options of a task are logged.
      - The environment of the module itself does not count. A unit without E(PATH) gets the default of systemd, and so does a build.
    type: dict
    default: {}
  modules:
    description:
      - Names of the FlashInfer modules to clear or build.
      - With O(state=absent), V(all) stands for every module, and V(stale) for those that M(blackwell.inference.gate) made stale and
        that nobody has cleared since. With O(state=built), a module must need no parameters, and V(all) is refused.
    type: list
    elements: str
    default: [trtllm_comm]
  clear:
    description:
      - With O(state=built), the modules that are cleared first, whatever their fingerprint says; V(all) and V(stale) as in O(modules).
      - Those among O(modules) are built again, the others when a server needs them.
    type: list
    elements: str
    default: []
  other_caches:
    description:
      - Other caches of the server to clear as well.
      - V(p2p_access) is what sglang found out about peer access between GPUs; it is wrong after a change of the driver, the BIOS or
        the slots.
      - V(autotune) is which kernel was the fastest; it is out of date after a change of the driver, CUDA or clocks.
      - V(torch_extension_locks) are lock files that a killed build of a torch extension left behind; the next build waits for them
        forever. Fails while a process has one open.
    type: list
    elements: str
    choices: [autotune, p2p_access, torch_extension_locks]
    default: []
  prebuilt:
    description:
      - What to do about a prebuilt library of the package flashinfer-jit-cache without code for this GPU, which flashinfer loads in
        place of anything that is built here (releases before 0.6.17 have none for 12.x).
      - With V(refuse), fail.
      - With V(set_aside), rename it, so that flashinfer does not find it. O(state=absent) without this value undoes that.
    type: str
    choices: [refuse, set_aside]
    default: refuse
  required:
    description:
      - With O(state=built), whether to fail on a host that cannot build, because it has no C(nvcc) or the venv has no torch.
      - Otherwise the modules are left to the server there, and RV(left_out) says why.
    type: bool
    default: true
  compute_capability:
    description:
      - Compute capabilities of the host's GPUs, for example V(12.0).
      - With O(state=absent), clear only what was built for one of them, alone or together with others. Of use where hosts with
        different GPUs share one home folder. Without it, everything is cleared.
      - With O(state=built), fail unless the server would build for all of them. On a host without a GPU, build for them.
    type: list
    elements: str
    default: []
  max_jobs:
    description:
      - With O(state=built), how many compilers may run at once.
      - Default is what cores and the available memory allow, at 8 GiB a compiler and with 16 GiB left over, and no more than
        E(MAX_JOBS) of O(environment).
    type: int
  state_dir:
    description: Folder in which M(blackwell.inference.gate) notes the modules that it made stale. The note goes once they are cleared.
    type: path
    default: /var/lib/blackwell-inference
  timeout:
    description: With O(state=built), seconds that all modules together may take.
    type: int
    default: 3600
notes:
  - Fails while a process has loaded a module that is to be cleared, or holds its build lock. Of processes that belong to other users,
    only root sees the first.
  - Build locks stay; a lock that nobody holds is harmless.
  - A build takes minutes. Every ten seconds, the sources that are being compiled and the time so far go to the system log, under the
    name that Ansible gives its modules, so C(journalctl -f) on the host shows them.
seealso:
  - module: blackwell.inference.gate
"""

EXAMPLES = r"""
- name: Clear what opening a gate made stale
  blackwell.inference.jit_cache:
    python: /opt/sglang/venv/bin/python
    user: sglang
    environment:
      HOME: /var/lib/sglang
      FLASHINFER_WORKSPACE_BASE: /var/cache/sglang
    modules: "{{ gate_result.stale_jit_modules }}"

- name: Build the fusion kernels before the server starts
  blackwell.inference.jit_cache:
    state: built
    python: /opt/sglang/venv/bin/python
    user: sglang
    environment:
      HOME: /var/lib/sglang
      PATH: /opt/sglang/venv/bin:/usr/local/cuda/bin:/usr/bin:/bin
      CUDA_HOME: /usr/local/cuda
    compute_capability: ["12.0"]

- name: Forget everything that depends on the driver
  blackwell.inference.jit_cache:
    python: /opt/sglang/venv/bin/python
    user: sglang
    modules: [all]
    other_caches: [autotune, p2p_access]
"""

RETURN = r"""
built:
  description: What was built and verified, or would be in check mode.
  returned: success
  type: list
  elements: dict
  contains:
    module:
      description: Name of the module.
      type: str
      sample: trtllm_comm
    library:
      description: The library that the server will load.
      type: str
      sample: /home/sglang/.cache/flashinfer/0.6.1/120a/cached_ops/trtllm_comm/trtllm_comm.so
    archs:
      description: What the library holds code for.
      type: list
      elements: str
      sample: [sm_120a]
    seconds:
      description: How long it took; null in check mode.
      type: float
      sample: 284.3
cache_dirs:
  description: The existing folders that were looked into.
  returned: success
  type: list
  elements: str
  sample: [/home/sglang/.cache/flashinfer/0.6.1/120a/cached_ops]
cache_root:
  description: The folder in which the server's FlashInfer keeps one folder for each set of GPU architectures; it need not exist.
  returned: success
  type: str
  sample: /home/sglang/.cache/flashinfer/0.6.1
left_out:
  description: With O(state=built) and O(required=false), why nothing could be built on this host. Otherwise null.
  returned: success
  type: str
  sample: there is no nvcc in /usr/local/cuda
libraries:
  description: With O(state=built), the library that the server loads, by module, be it built now or before.
  returned: success
  type: dict
  sample: {trtllm_comm: /home/sglang/.cache/flashinfer/0.6.1/120a/cached_ops/trtllm_comm/trtllm_comm.so}
freed_bytes:
  description: Sum of the sizes of all files that were removed.
  returned: success
  type: int
  sample: 11534336
moved:
  description: Prebuilt libraries that were set aside or put back, or would be in check mode.
  returned: success
  type: list
  elements: dict
  contains:
    source:
      description: Path before.
      type: str
      sample: /opt/sglang/venv/lib/python3.12/site-packages/flashinfer_jit_cache/jit_cache/trtllm_comm/trtllm_comm.so
    target:
      description: Path after.
      type: str
      sample: /opt/sglang/venv/lib/python3.12/site-packages/flashinfer_jit_cache/jit_cache/trtllm_comm/trtllm_comm.so.set-aside
removed:
  description: What was removed, or would be in check mode.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: Folder of a module, or file or folder of another cache.
      type: str
      sample: /home/sglang/.cache/flashinfer/0.6.1/120a/cached_ops/trtllm_comm
    bytes:
      description: Sum of the sizes of its files.
      type: int
      sample: 11534336
shadowed_by:
  description:
    - With O(state=built), the prebuilt libraries, by module, that the server loads in place of anything that is built here.
    - They hold code for this GPU, so nothing is built; but editing sources or clearing the cache has no effect on such a module.
  returned: success
  type: dict
  sample: {}
skipped:
  description: What looks like part of the cache and was left alone.
  returned: success
  type: list
  elements: dict
  contains:
    path:
      description: The folder or symlink.
      type: str
      sample: /home/sglang/.cache/flashinfer/0.6.1/90a
    reason:
      description: Why it was left alone.
      type: str
      sample: built for other GPUs than 12.0
stale:
  description: With O(state=built), the modules that are built (again) and why.
  returned: success
  type: list
  elements: dict
  contains:
    module:
      description: Name of the module.
      type: str
      sample: trtllm_comm
    reason:
      description: What is wrong with what is in the cache.
      type: str
      sample: flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh changed since
"""

import os
import re

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_build as jit_build
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache as jit_cache
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_files as files
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_others as others
from ansible_collections.blackwell.inference.plugins.module_utils import _jit_cache_prebuilt as prebuilt
from ansible_collections.blackwell.inference.plugins.module_utils._account import find, make_folder
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store

STALE = "stale"  # stands for the modules that an edit of the gates made stale


class Outcome:
    """What a run does or, in check mode, would do; the options that say where are resolved in here."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.params = module.params
        _check_options(self.params)
        site = locate(self.params["python"], self.params["site_packages"])
        site.require("flashinfer", "sglang")
        self.packages = site.packages
        self.environment = {name: str(value) for name, value in self.params["environment"].items() if value is not None}
        self.cache = jit_cache.resolve(
            self.packages["flashinfer"].location, self.packages["sglang"].location, self.environment, self.params["user"]
        )
        self.cache_dirs: list[str] = []
        self.skipped: list[files.Skipped] = []
        self.removed: list[files.Entry] = []
        self.moved: list[dict] = []
        self.stale: list[dict] = []
        self.built: list[dict] = []
        self.shadowed_by: dict[str, str] = {}
        self.left_out: str | None = None
        self.libraries: dict[str, str] = {}
        self.store, self.root = Store(self.params["state_dir"]), self.packages["flashinfer"].root

    def named(self, option: str) -> list[str]:
        """Return the modules that an option names, with those that are marked as stale in place of V(stale)."""
        marked = self.store.stale_modules(self.root) if STALE in self.params[option] else []
        return [name for name in self.params[option] if name != STALE] + [name for name in marked if name not in self.params[option]]

    def forget_stale(self, modules: list[str]) -> None:
        """Note that modules are no longer stale, so that the next run leaves them alone."""
        if not self.module.check_mode:
            marked = self.store.stale_modules(self.root)
            self.store.forget_stale(self.root, [name for name in marked if name in modules or jit_cache.ALL in modules])

    def survey(self, modules: list[str]) -> list[files.Entry]:
        """Find the folders of modules."""
        found = jit_cache.survey(self.cache, modules, self.params["compute_capability"])
        self.cache_dirs, self.skipped = found.cache_dirs, found.skipped
        return found.stale

    def clear(self, modules: list[files.Entry]) -> None:
        """Remove folders of modules and the other caches that were asked for, or nothing if one of them is in use."""
        other = others.find(self.params["other_caches"], self.environment, self.params["user"], self.skipped)
        jit_cache.remove(modules, self.module.check_mode)
        for entry in [] if self.module.check_mode else other:
            files.remove(entry)
        self.removed = modules + other

    def move(self, source: str, target: str) -> None:
        """Rename a prebuilt library."""
        prebuilt.move(source, target, self.module.check_mode)
        self.moved.append({"source": source, "target": target})

    def result(self, changed: bool = False) -> dict:
        """Return what the module returns."""
        for item in self.skipped:
            if item.needs_hand:
                self.module.warn(f"{item.path} {item.reason}; it was left alone. Clear it by hand.")
        before = [f"{item.path} ({item.bytes} bytes)" for item in self.removed] + [item["source"] for item in self.moved]
        after = [item["target"] for item in self.moved] + [f"{item['library']} for {', '.join(item['archs'])}" for item in self.built]
        return {
            "changed": changed or bool(before or after),
            "cache_root": self.cache.path,
            "cache_dirs": self.cache_dirs,
            "removed": [{"path": item.path, "bytes": item.bytes} for item in self.removed],
            "freed_bytes": sum(item.bytes for item in self.removed),
            "skipped": [{"path": item.path, "reason": item.reason} for item in self.skipped],
            "moved": self.moved,
            "stale": self.stale,
            "built": self.built,
            "shadowed_by": self.shadowed_by,
            "left_out": self.left_out,
            "libraries": self.libraries,
            "diff": {
                "before_header": self.cache.path,
                "after_header": self.cache.path,
                "before": "".join(f"{line}\n" for line in before),
                "after": "".join(f"{line}\n" for line in after),
            },
        }


def _check_options(params: dict) -> None:
    for option in ("modules", "clear"):
        for name in params[option]:
            if not re.fullmatch(r"\w+", name, re.ASCII) or name == jit_cache.LOCKS:
                raise InferenceError(option, repr(name), "the name of a FlashInfer module, e.g. trtllm_comm, or all")
    if params["state"] == "built" and jit_cache.ALL in params["modules"]:
        raise InferenceError("modules", ", ".join(params["modules"]), "names of modules, for state=built")
    for capability in params["compute_capability"]:
        if not re.fullmatch(r"\d{1,2}\.\d", capability):
            raise InferenceError("compute_capability", repr(capability), "major.minor, e.g. 12.0")
    for option in ("max_jobs", "timeout"):
        if params[option] is not None and params[option] < 1:
            raise InferenceError(option, str(params[option]), "a positive number")


def absent(outcome: Outcome) -> dict:
    """Clear the named modules; put their prebuilt libraries back."""
    params = outcome.params
    modules = outcome.named("modules")
    outcome.clear(outcome.survey(modules))
    if params["prebuilt"] != "set_aside":
        for library in prebuilt.find(outcome.packages, modules, prebuilt.ASIDE):
            outcome.move(library, library[: -len(prebuilt.ASIDE)])
    outcome.forget_stale(modules)
    return outcome.result()


def built(outcome: Outcome) -> dict:
    """Clear what is stale, build what is missing, verify it."""
    params, wanted, clear = outcome.params, outcome.named("modules"), outcome.named("clear")
    outcome.left_out = None if params["required"] else _lacks(outcome)
    if outcome.left_out or not wanted:
        outcome.clear(outcome.survey(clear))
        outcome.forget_stale(clear)
        return outcome.result()
    service = jit_build.Service(params["python"], params["user"], outcome.environment, outcome.cache.base)
    account = find(params["user"])
    if account and not outcome.module.check_mode:
        make_folder(account, outcome.cache.base)
    try:
        description = jit_build.describe(service, wanted, params["compute_capability"])
        in_the_way = _in_the_way(outcome, description["modules"])
        modules = {name: module for name, module in description["modules"].items() if name not in outcome.shadowed_by}
        if modules:
            jit_build.refuse({**description, "modules": modules}, service, params["compute_capability"])
    except jit_build.NotYet as error:
        if not outcome.module.check_mode:
            raise
        outcome.module.warn(f"{error} In a run, an earlier task may do so; then the modules are built.")
        outcome.clear(outcome.survey(clear))
        return outcome.result(changed=True)
    for name, module in modules.items():
        reason = "it was named in clear" if {name, jit_cache.ALL} & {*clear} else jit_build.stale_because(module)
        if reason:
            outcome.stale.append({"module": name, "reason": reason})
    names = [item["module"] for item in outcome.stale]
    asked, folder = outcome.survey(clear), os.path.join(description["workspace"], "cached_ops")
    outcome.clear(asked + [item for item in outcome.survey(names) if item not in asked and os.path.dirname(item.path) == folder])
    for library in in_the_way:
        outcome.move(library, library + prebuilt.ASIDE)
    if names and not outcome.module.check_mode:
        outcome.store.mark_stale(outcome.root, names)  # until they are built: a build that fails is made up for by the next run
    done = _build(outcome, service, names) if names and not outcome.module.check_mode else {}
    for name in names:
        archs = jit_build.verify(modules[name], done[name]["library"]) if done else modules[name]["codes"]
        seconds = done[name]["seconds"] if done else None
        outcome.built.append({"module": name, "library": modules[name]["library"], "archs": archs, "seconds": seconds})
    outcome.libraries = {**{name: module["library"] for name, module in modules.items()}, **outcome.shadowed_by}
    outcome.forget_stale([*clear, *modules])
    return outcome.result()


def _lacks(outcome: Outcome) -> str | None:
    """Return what this host lacks to build anything; None if nothing."""
    if not jit_build.nvcc(outcome.environment):
        return f"there is no nvcc in {outcome.environment.get('CUDA_HOME') or 'PATH'}"
    return None if "torch" in outcome.packages else f"{outcome.params['python']} has no torch"


def _in_the_way(outcome: Outcome, modules: dict) -> list[str]:
    """Note the prebuilt libraries that will do, which is as good as built; return those that have to be set aside."""
    found = []
    for name, module in modules.items():
        libraries = module.get("prebuilt", [])
        missing = jit_build.missing_code(libraries, module["codes"]) if libraries else []
        if libraries and not missing:
            outcome.shadowed_by[name] = libraries[0]
        elif libraries and outcome.params["prebuilt"] != "set_aside":
            raise InferenceError(
                libraries[0],
                f"the server loads this prebuilt library, without code for {missing[0]}, in place of what is built here",
                "one that has such code, or none",
                "Uninstall or upgrade flashinfer-jit-cache, or set prebuilt to set_aside.",
            )
        elif libraries:
            # The answer comes from a process of the server's user, who must not have root rename what it likes.
            known = prebuilt.find(outcome.packages, [name])
            for library in libraries:
                if os.path.realpath(library) not in known:
                    raise InferenceError(library, "this library is no part of the packages, so it is not set aside", "a prebuilt module")
            found += libraries
    return found


def _build(outcome: Outcome, service: jit_build.Service, names: list[str]) -> dict:
    params = outcome.params
    jobs = params["max_jobs"] or jit_build.max_jobs_here(outcome.environment)
    outcome.module.log(f"building {', '.join(names)} with at most {jobs} compilers at once")
    return jit_build.build(service, names, params["compute_capability"], jobs, params["timeout"], outcome.module.log)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["absent", "built"], "default": "absent"},
            "python": {"type": "path"},
            "site_packages": {"type": "path"},
            "user": {"type": "str"},
            "environment": {"type": "dict", "default": {}},
            "modules": {"type": "list", "elements": "str", "default": ["trtllm_comm"]},
            "clear": {"type": "list", "elements": "str", "default": []},
            "other_caches": {"type": "list", "elements": "str", "choices": list(others.NAMES), "default": []},
            "prebuilt": {"type": "str", "choices": ["refuse", "set_aside"], "default": "refuse"},
            "required": {"type": "bool", "default": True},
            "compute_capability": {"type": "list", "elements": "str", "default": []},
            "max_jobs": {"type": "int"},
            "timeout": {"type": "int", "default": 3600},
            "state_dir": {"type": "path", "default": "/var/lib/blackwell-inference"},
        },
        mutually_exclusive=[("python", "site_packages")],
        required_one_of=[("python", "site_packages")],
        required_if=[("state", "built", ["python"])],
        supports_check_mode=True,
    )
    try:
        result = {"absent": absent, "built": built}[module.params["state"]](Outcome(module))
    except InferenceError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
