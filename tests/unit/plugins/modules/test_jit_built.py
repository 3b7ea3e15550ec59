# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""jit_cache state=built against released flashinfer code; torch and the compilers are stand-ins (tests/kernels has real ones)."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._packages import locate
from ansible_collections.blackwell.inference.plugins.module_utils._store import Store
from ansible_collections.blackwell.inference.plugins.modules import jit_cache
from ansible_collections.blackwell.inference.tests.unit.jit_stand_in import serving_venv, shared_library

# The releases differ in how they name architectures, write build.ninja, find prebuilt libraries, and in JitSpec.build.
both_releases = pytest.mark.parametrize("pristine", ["0.6.6", "0.6.18"], indirect=True)


@pytest.fixture(scope="module")
def pristine(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pristine") / "venv"
    serving_venv(folder, getattr(request, "param", "0.6.6"), "0.5.8")
    return folder


class Host:
    """A host with one serving venv and one service."""

    def __init__(self, root: Path, venv: Path, run_here) -> None:
        self.home = root / "home"
        self.run_here = run_here
        self.venv = venv
        (self.packages,) = (venv / "lib").glob("python*/site-packages")
        self.flashinfer = self.packages / "flashinfer"
        self.version = next(self.packages.glob("flashinfer_python-*.dist-info")).name.split("-")[1].removesuffix(".dist")
        self.arch = "120a" if self.version == "0.6.6" else "120f"
        self.folder = self.home / ".cache/flashinfer" / self.version / self.arch / "cached_ops/trtllm_comm"
        self.library = self.folder / "trtllm_comm.so"
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{venv}/cuda/bin:/usr/bin:/bin",
            "CUDA_HOME": f"{venv}/cuda",
            "STAND_IN_GPUS": "12.0 12.0",
        }
        self.home.mkdir()
        self.edit(
            "jit/comm.py",
            'supported_major_versions=[9, 10]\n    )\n    return gen_jit_spec(\n        "trtllm_comm"',
            'supported_major_versions=[9, 10, 12]\n    )\n    return gen_jit_spec(\n        "trtllm_comm"',
        )

    def edit(self, name: str, old: str, new: str) -> Path:
        path = self.flashinfer / name
        text = path.read_text()
        path.unlink()  # it may be shared with other hosts
        path.write_text(text.replace(old, new))
        return path

    def run(self, check: bool = False, environment: dict | None = None, **options) -> dict:
        arguments = {
            "state": "built",
            "python": str(self.venv / "bin/python"),
            "environment": {**self.environment, **(environment or {})},
            "max_jobs": 3,
            "state_dir": str(self.home.parent / "state"),
            **options,
        }
        return self.run_here(jit_cache, arguments, check=check)


@pytest.fixture
def host(tmp_path, pristine, run_here) -> Host:
    shutil.copytree(pristine, tmp_path / "venv", symlinks=True, copy_function=os.link)
    return Host(tmp_path, tmp_path / "venv", run_here)


@both_releases
def test_a_module_is_built_once(host):
    predicted, first, second = host.run(check=True), host.run(), host.run()
    assert not predicted["removed"]
    assert first["stale"] == predicted["stale"] == [{"module": "trtllm_comm", "reason": "it is not built"}]
    (built,) = first["built"]
    assert built.pop("seconds") >= 0
    assert built == {"module": "trtllm_comm", "library": str(host.library), "archs": [f"sm_{host.arch}"]}
    assert predicted["built"] == [{**built, "seconds": None}]
    assert first["diff"]["after"] == f"{host.library} for sm_{host.arch}\n"
    assert host.library.is_file()
    assert (second["changed"], second["built"], second["stale"]) == (False, [], [])


def test_check_mode_leaves_no_trace(host):
    assert host.run(check=True)["changed"]
    assert list(host.home.iterdir()) == []


def test_the_build_has_the_environment_of_the_service_and_no_other(host, monkeypatch):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    host.run(environment={"MAX_JOBS": "1", "MODEL_KEY": 7}, max_jobs=None)
    environment = dict(line.split("=", 1) for line in (host.folder / "environment").read_text().splitlines())
    assert environment["MAX_JOBS"] == "1"
    assert environment["MODEL_KEY"] == "7"
    assert environment["FLASHINFER_WORKSPACE_BASE"] == str(host.home)
    assert environment["FLASHINFER_CUDA_ARCH_LIST"] == "12.0a"  # as sglang sets it


def test_root_builds_as_the_service_user(host, monkeypatch):
    started, popen = {}, subprocess.Popen

    def start(command, *arguments, **options):
        if "-B" not in command:
            return popen(command, *arguments, **options)
        started.update(options)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(subprocess, "Popen", start)
    message = f"python: nobody cannot run {host.venv}/bin/python (Permission denied); expected"
    assert host.run(user="nobody")["msg"].startswith(message)
    account = pwd.getpwnam("nobody")
    assert (started["user"], started["group"], started["extra_groups"]) == (account.pw_uid, account.pw_gid, [account.pw_gid])
    assert started["env"]["HOME"] == str(host.home)


def test_nobody_but_root_builds_for_another_user(host, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert host.run(user="nobody")["msg"].startswith("user: nobody, but the module runs as uid 12345; expected root or that user.")


@both_releases
def test_a_host_without_gpus_builds_into_the_folder_of_a_real_one(host):
    assert host.run(environment={"STAND_IN_GPUS": ""}, compute_capability=["12.0"])["built"][0]["library"] == str(host.library)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda host: host.edit("data/csrc/trtllm_allreduce.cu", "", " "), "flashinfer/data/csrc/trtllm_allreduce.cu changed since"),
        (lambda host: host.environment.update(FLASHINFER_JIT_LINEINFO="1"), "compiler flags or paths changed"),
        (lambda host: host.environment.update(STAND_IN_NVCC="13.1"), "it was built with nvcc 13.0, now it is 13.1"),
        (lambda host: host.library.write_bytes(shared_library("sm_90a")), "it holds code for sm_90a and not for"),
        (lambda host: host.library.write_bytes(shared_library("sm_120a")[:100]), "it is not a whole library"),
        (lambda host: host.library.unlink(), "it is not built"),
        (lambda host: os.utime(host.library, (1, 1)), "ninja would build it again"),
    ],
)
def test_what_changed_since_makes_it_stale(host, change, reason):
    host.run()
    change(host)
    if reason.startswith("flashinfer"):  # an edit that ninja cannot notice
        os.utime(host.flashinfer / "data/csrc/trtllm_allreduce.cu", (1, 1))
    predicted, result = host.run(check=True), host.run()
    assert result["stale"][0]["reason"].startswith(reason)
    assert predicted["stale"] == result["stale"]
    assert [item["path"] for item in result["removed"]] == [str(host.folder)]
    assert not host.run()["changed"]


def test_what_a_server_built_itself_is_good_while_its_flags_are_the_expected_ones(host):
    host.run()
    (host.folder / "blackwell-inference.json").unlink()
    assert not host.run()["changed"]
    host.environment["FLASHINFER_JIT_LINEINFO"] = "1"
    assert host.run()["stale"] == [{"module": "trtllm_comm", "reason": "compiler flags or paths changed"}]


def test_what_a_server_built_itself_is_stale_once_a_source_was_replaced_whatever_its_date(host):
    host.run()
    (host.folder / "blackwell-inference.json").unlink()
    source = host.edit("data/csrc/trtllm_allreduce.cu", "#include", "#  include")
    os.utime(source, (1, 1))  # as installers, tar and cp -p do
    reason = "flashinfer/data/csrc/trtllm_allreduce.cu was replaced after a server had built it"
    assert host.run()["stale"] == [{"module": "trtllm_comm", "reason": reason}]
    assert not host.run()["changed"]


def test_a_second_venv_with_the_same_home_does_not_get_the_code_of_the_first(host, tmp_path):
    host.run()
    shutil.copytree(host.venv, tmp_path / "second", symlinks=True, copy_function=os.link)
    second = {"python": str(tmp_path / "second/bin/python")}
    result = host.run(**second)
    assert result["stale"] == [{"module": "trtllm_comm", "reason": "compiler flags or paths changed"}]
    assert result["built"][0]["library"] == str(host.library)
    assert not host.run(**second)["changed"]


def test_modules_in_clear_are_cleared_whatever_they_are(host):
    host.run()
    other = host.folder.parent / "norm"
    other.mkdir()
    result = host.run(clear=["trtllm_comm", "norm"])
    assert result["stale"] == [{"module": "trtllm_comm", "reason": "it was named in clear"}]
    assert [item["path"] for item in result["removed"]] == [str(other), str(host.folder)]
    assert host.library.is_file()
    assert not other.exists()


def test_the_first_compiler_error_is_the_message(host):
    error = 'x.cuh(12): error: identifier "y" is undefined'
    result = host.run(environment={"STAND_IN_ERROR": error})
    assert result["msg"] == f"modules trtllm_comm: the build failed: {error}; expected one without errors."


def test_a_compiler_that_ran_out_of_memory(host):
    result = host.run(environment={"STAND_IN_ERROR": "nvcc error   : 'cicc' died due to signal 9 (Kill signal)"})
    assert result["msg"].endswith("died due to signal 9 (Kill signal); expected one without errors. Give fewer max_jobs.")


def test_a_build_that_takes_too_long_is_ended(host):
    result = host.run(environment={"STAND_IN_SECONDS": "60"}, timeout=2)
    assert result["msg"].startswith("timeout: not done after 2 s, compiling nothing; expected a longer time")
    assert not any(b"STAND_IN_SECONDS" in read(f"/proc/{name}/environ") for name in os.listdir("/proc") if name.isdigit())


def read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def test_a_library_with_other_code_than_asked_for_is_not_accepted(host):
    result = host.run(environment={"STAND_IN_CODES": "sm_90a"})
    assert result["msg"] == f"{host.library}: holds code for sm_90a; expected sm_{host.arch}."


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({"CUDA_HOME": ":/usr/local/cuda"}, {}, "environment CUDA_HOME: ':/usr/local/cuda' holds no bin/nvcc; expected the one folder"),
        ({"CUDA_HOME": "/nowhere"}, {}, "environment CUDA_HOME: '/nowhere' holds no bin/nvcc; expected the one folder of a CUDA toolkit."),
        ({"FLASHINFER_CUDA_ARCH_LIST": "sm_120"}, {}, "environment FLASHINFER_CUDA_ARCH_LIST: 'sm_120'; expected e.g. 12.0a"),
        ({"FLASHINFER_CUDA_ARCH_LIST": "12.0,9.0"}, {}, "environment FLASHINFER_CUDA_ARCH_LIST: '12.0,9.0'; expected e.g. 12.0a"),
        ({"FLASHINFER_DISABLE_JIT": "1"}, {}, "environment FLASHINFER_DISABLE_JIT: it is set"),
        ({"PATH": "/nowhere"}, {}, "environment PATH: no ninja in it; expected one that the server finds too: its PATH is /nowhere."),
        ({"STAND_IN_GPUS": ""}, {}, "compute_capability: torch sees no GPU here; expected the capability to build for"),
        (
            {"STAND_IN_GPUS": "9.0"},
            {"compute_capability": ["12.0"]},
            "compute_capability: 12.0; expected one that the server would build for, ",
        ),
        ({"STAND_IN_GPUS": "8.9"}, {}, "module trtllm_comm: flashinfer refuses to build it (No supported CUDA architectures found for"),
        ({"STAND_IN_GPUS": "8.9 9.0"}, {}, "module trtllm_comm: flashinfer builds it for sm_90a and leaves out sm_89; expected code"),
        ({"STAND_IN_LINK_ERROR": "1"}, {}, "module trtllm_comm: /usr/bin/ld: cannot find -lcuda: No such file or directory; expected"),
        ({}, {"modules": ["norm_or_so"]}, "modules: this flashinfer cannot build norm_or_so by its name alone; expected e.g. trtllm_comm."),
        ({}, {"modules": ["all"]}, "modules: all; expected names of modules, for state=built."),
        ({}, {"max_jobs": 0}, "max_jobs: 0; expected a positive number."),
        ({}, {"user": "nobody-of-this-name"}, "user: nobody-of-this-name does not exist on this host; expected the user"),
    ],
)
def test_refusals_are_one_line_and_come_before_any_compiler(host, environment, options, message):
    result = host.run(environment=environment, **options)
    assert result["msg"].startswith(message)
    assert "\n" not in result["msg"]
    assert list(host.home.iterdir()) == []


@both_releases
def test_an_nvcc_that_is_too_old_is_refused(host):
    unknown = host.run(environment={"STAND_IN_UNKNOWN": host.arch})
    assert unknown["msg"].startswith(
        f"module trtllm_comm: nvcc fatal   : Unsupported gpu architecture 'compute_{host.arch}'; found nvcc 13.0"
    )
    if host.version == "0.6.18":
        expected = "SM 12.x requires CUDA >= 12.9; found nvcc 12.8 ("
        assert host.run(environment={"STAND_IN_NVCC": "12.8"})["msg"].startswith(f"flashinfer 0.6.18: {expected}")
        listed = {"STAND_IN_NVCC": "12.8", "FLASHINFER_CUDA_ARCH_LIST": "12.0"}
        assert host.run(environment=listed)["msg"].startswith(f"python {host.venv}/bin/python: {expected}")
    else:
        listed = {"FLASHINFER_CUDA_ARCH_LIST": "12.0"}
        assert (
            "flashinfer 0.6.6 takes it as sm_120, for which the kernels do not compile; expected 12.0a"
            in host.run(environment=listed)["msg"]
        )


@both_releases
def test_a_closed_gate_fails_a_run_and_warns_in_check_mode(host):
    host.edit("jit/comm.py", "[9, 10, 12]", "[9, 10]")
    message = "module trtllm_comm: flashinfer refuses to build it (No supported CUDA architectures found for major versions [9, 10].)"
    assert host.run()["msg"].startswith(message)
    predicted = host.run(check=True)
    assert predicted["changed"]
    assert message in str(predicted["warnings"])


def test_check_mode_says_what_goes_even_where_the_gate_is_still_closed(host):
    host.edit("jit/comm.py", "[9, 10, 12]", "[9, 10]")
    host.folder.mkdir(parents=True)
    predicted = host.run(check=True, clear=["trtllm_comm"])
    assert [item["path"] for item in predicted["removed"]] == [str(host.folder)]
    assert host.folder.is_dir()


@pytest.mark.parametrize("lacking", ["nvcc", "torch"])
def test_a_host_that_cannot_build_leaves_it_to_the_server_where_that_is_allowed(host, lacking):
    if lacking == "torch":
        shutil.rmtree(host.packages / "torch")
    host.folder.mkdir(parents=True)
    environment = {"CUDA_HOME": "/none", "PATH": "/bin"} if lacking == "nvcc" else {}
    options = {"environment": environment, "required": False, "clear": ["trtllm_comm"]}
    predicted, done, again = host.run(check=True, **options), host.run(**options), host.run(**options)
    assert done["left_out"] == {"nvcc": "there is no nvcc in /none", "torch": f"{host.venv}/bin/python has no torch"}[lacking]
    assert predicted["removed"] == done["removed"] == [{"path": str(host.folder), "bytes": 0}]
    assert (again["changed"], again["built"], again["libraries"]) == (False, [], {})
    assert host.run(environment=environment)["failed"]


def test_a_host_that_can_build_does_so_all_the_same(host):
    result = host.run(required=False)
    assert (result["left_out"], len(result["built"])) == (None, 1)


def test_what_is_marked_as_stale_is_built_and_nothing_where_nothing_is(host):
    site = locate(str(host.venv / "bin/python"))
    store = Store(str(host.home.parent / "state"))
    assert host.run(modules=["stale"])["libraries"] == {}
    store.mark_stale(site.packages["flashinfer"].root, ["trtllm_comm"])
    assert host.run(modules=["stale"], clear=["stale"])["libraries"] == {"trtllm_comm": str(host.library)}
    assert host.run(modules=["stale"], clear=["stale"])["changed"] is False


def test_a_build_that_fails_is_made_up_for_by_the_next_run(host):
    root = locate(str(host.venv / "bin/python")).packages["flashinfer"].root
    store = Store(str(host.home.parent / "state"))
    assert host.run(timeout=1, environment={"STAND_IN_SECONDS": "60"})["failed"]
    assert store.stale_modules(root) == ["trtllm_comm"]
    assert host.run(modules=["stale"])["built"]
    assert store.stale_modules(root) == []


@pytest.fixture
def prebuilt(host) -> Path:
    """A library of flashinfer-jit-cache, laid out as in its releases before 0.6.17."""
    package = host.packages / "flashinfer_jit_cache"
    library = package / "jit_cache/trtllm_comm/trtllm_comm.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(shared_library("sm_90a", "sm_100a"))
    init = f'__version__ = "{host.version}"\ndef get_jit_cache_dir():\n    return {str(package / "jit_cache")!r}\n'
    (package / "__init__.py").write_text(init)
    return library


def test_a_prebuilt_library_without_code_for_the_gpu_is_refused(host, prebuilt):
    result = host.run()
    assert result["msg"].startswith(f"{prebuilt}: the server loads this prebuilt library, without code for sm_{host.arch}, in place of")
    assert "\n" not in result["msg"]


@both_releases
def test_a_prebuilt_library_is_set_aside_and_put_back(host, prebuilt):
    aside = Path(f"{prebuilt}.set-aside")
    predicted, result = host.run(check=True, prebuilt="set_aside"), host.run(prebuilt="set_aside")
    assert predicted["moved"] == result["moved"] == [{"source": str(prebuilt), "target": str(aside)}]
    assert host.library.is_file()
    assert aside.is_file()
    assert not prebuilt.exists()
    assert not host.run(prebuilt="set_aside")["changed"]
    assert not host.run()["changed"]
    back = host.run(state="absent")
    assert back["moved"] == [{"source": str(aside), "target": str(prebuilt)}]
    assert prebuilt.read_bytes() == shared_library("sm_90a", "sm_100a")
    assert not host.run(state="absent")["changed"]


def test_a_library_outside_the_packages_is_never_renamed(host, prebuilt, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    shutil.move(prebuilt.parents[1], elsewhere)
    prebuilt.parents[2].joinpath("__init__.py").write_text(
        f'__version__ = "{host.version}"\ndef get_jit_cache_dir():\n    return {str(elsewhere)!r}\n'
    )
    library = elsewhere / "trtllm_comm/trtllm_comm.so"
    result = host.run(prebuilt="set_aside")
    assert result["msg"] == f"{library}: this library is no part of the packages, so it is not set aside; expected a prebuilt module."
    assert library.exists()


@both_releases
def test_a_prebuilt_library_with_code_for_the_gpu_is_as_good_as_built(host, prebuilt):
    prebuilt.write_bytes(shared_library("sm_90a", "sm_120f"))
    (host.venv / "cuda/bin/ninja").unlink()  # it needs no toolchain
    result = host.run()
    assert (result["changed"], result["shadowed_by"]) == (False, {"trtllm_comm": str(prebuilt)})
