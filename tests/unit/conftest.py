# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A small installation that the gate engine is tested on: simulated packages with every kind of gate in them, as one pair ships it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace

import hypothesis
import pytest
from ansible.module_utils.common import warnings
from ansible.module_utils.testing import patch_module_args
from ansible_collections.blackwell.inference.plugins.modules import gate
from xdist.scheduler import LoadScopeScheduling

hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, database=None, max_examples=60, print_blob=False)
hypothesis.settings.register_profile("thorough", deadline=None, database=None, max_examples=500)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

COLLECTIONS = Path(__file__).parents[2] / ".venv" / "collections"
MODULES = Path(__file__).parents[2] / "plugins" / "modules"
# Their tests look at what one fixture did with runs of ansible-playbook, which take up to a minute.
FILES_OF_ONE_WORKER = ("test_sglang_server.py", "test_gpu_host.py", "test_report.py")

FLASHINFER = "flashinfer_python-0.6.9"
SGLANG = "sglang-0.5.14"
SOURCES = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/comm.py": '''\
"""Simulated: modules for communication."""

from . import context, gen_jit_spec


def gen_mixed_comm_module():
    return gen_jit_spec("mixed_comm", context.get_nvcc_flags_list(supported_major_versions=[9, 10]))


def gen_trtllm_comm_module():
    flags = context.get_nvcc_flags_list(supported_major_versions=[9, 10])
    return gen_jit_spec("trtllm_comm", flags)
''',
    "flashinfer/jit/mla.py": """\
def gen_mla_module():
    return gen_jit_spec("mla", context.get_nvcc_flags_list(supported_major_versions=[10, 11]))
""",
    "flashinfer/comm/mnnvl.py": """\
class SymmDeviceMemory:
    def __init__(self, size, device, enable_multicast=True):
        self.size = size
        supported = check(cuda.cuDeviceGetAttribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device))
        if supported == 0:
            raise RuntimeError("no multicast")
        self._allocate(enable_multicast)

    def _get_allocation_prop(self, size):
        prop = cuda.CUmemAllocationProp()
        alloc_granularity = check(cuda.cuMemGetAllocationGranularity(prop))
        mc_prop = cuda.CUmulticastObjectProp()
        mc_prop.size = size
        self._mc_granularity = check(cuda.cuMulticastGetGranularity(mc_prop))
        return prop, mc_prop, alloc_granularity
""",
    "flashinfer/comm/trtllm_ar.py": "from .mnnvl import SymmDeviceMemory\n\nworkspace = SymmDeviceMemory(1, 0, enable_multicast=False)\n",
    "flashinfer/data/include/flashinfer/comm/trtllm_allreduce.cuh": """\
// Simulated: #if __CUDA_ARCH__ < 800 is a comment
constexpr int MAX_RANKS_PER_NODE = 16;

__global__ void lamport_style_one_shot_all_reduce_norm_kernel(AllReduceParams<T> params) {
#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900) && (__CUDA_ARCH__ < 1200))
  reduce(params, "#if __CUDA_ARCH__ < 900");
#endif
}

cudaError_t lamport_style_one_shot_all_reduce_norm_kernel_launcher(AllReduceParams<T> params) {
  int cluster_size = std::min(((warps_per_token + warp_min_number - 1) / warp_min_number),
                              details::kClusterMaxSize);
  return launch(cluster_size, params);
}
""",
    "flashinfer/data/csrc/trtllm_allreduce.cu": """\
void trtllm_custom_all_reduce(TensorView in, int64_t tp_size) {
  for (int i = 0; i < tp_size; ++i) {
    params.lamport_peer_comm_buffer_ptrs[i] = first[i];
    params.lamport_peer_comm_buffer_ptrs[i + tp_size] = second[i];
    params.lamport_peer_comm_buffer_ptrs[i + tp_size * 2] = third[i];
  }
}
""",
    "flashinfer/data/include/flashinfer/trtllm/fmha/fmhaRunner.cuh": """\
class TllmGenFmhaRunner {
 public:
  TllmGenFmhaRunner() : mSM(getSMVersion()) {
    FLASHINFER_CHECK(mSM == kSM_100 || mSM == kSM_103, "Unsupported architecture");
  }
};
""",
    "sglang/__init__.py": "",
    "sglang/srt/server_args.py": """\
from sglang.srt.utils import is_sm90_supported, is_sm100_supported


class ServerArgs:
    def __post_init__(self):
        if self.flashinfer_allreduce_fusion_backend is None and (is_sm90_supported() or is_sm100_supported()):
            self.flashinfer_allreduce_fusion_backend = "auto"
""",
    "sglang/srt/layers/communicator.py": """\
import torch

from sglang.srt.utils import is_cuda, is_sm90_supported, is_sm100_supported

_is_cuda = is_cuda()
_is_sm90_supported = _is_cuda and is_sm90_supported()
_is_sm100_supported = _is_cuda and is_sm100_supported()


def apply_flashinfer_allreduce_fusion(batch_size: int):
    return (
        # both of them
        (_is_sm90_supported or _is_sm100_supported)
        and batch_size > 0
        and get_server_args().flashinfer_allreduce_fusion_backend is not None
    )


def decoy():
    return _is_sm90_supported or _is_sm100_supported
""",
    "sglang/srt/layers/flashinfer_comm_fusion.py": """\
import torch

from sglang.srt.utils import is_sm90_supported, is_sm100_supported


def _mnnvl_supported(is_multi_node):
    if is_sm100_supported():
        return True
    return is_sm90_supported() and not is_multi_node


def _resolve_backend(backend, is_multi_node=False):
    if not (is_sm90_supported() or is_sm100_supported()):
        raise ValueError("requires SM90 or SM10X")
    if backend == "auto":
        return "mnnvl" if is_sm100_supported() else "trtllm"
    if backend == "mnnvl" and not _mnnvl_supported(is_multi_node):
        raise ValueError("mnnvl")
    return backend


def _flashinfer_trtllm_workspace_allocation_sizes(driver, prop, sizes):
    allocation_sizes = []
    for size in sizes:
        error, granularity = driver.cuMemGetAllocationGranularity(prop)
        allocation_size = ceil_align(size, granularity)
        mc_prop = driver.CUmulticastObjectProp()
        mc_prop.size = allocation_size
        error, mc_granularity = driver.cuMulticastGetGranularity(mc_prop)
        if error != driver.CUDA_SUCCESS:
            raise RuntimeError("no granularity")
        allocation_size = ceil_align(allocation_size, mc_granularity)
        allocation_sizes.append(allocation_size)
    return allocation_sizes


workspace = comm.create_allreduce_fusion_workspace(backend="trtllm")
""",
}
# What is edited to open every gate for 12.0, and the gates that are opened.
EDITED = [
    "flashinfer/comm/mnnvl.py",
    "flashinfer/jit/comm.py",
    "sglang/srt/layers/communicator.py",
    "sglang/srt/layers/flashinfer_comm_fusion.py",
]
OPENED = [
    "flashinfer.trtllm_comm.majors",
    "flashinfer.workspace.multicast_device",
    "flashinfer.workspace.multicast_granularity",
    "sglang.fusion.applies",
    "sglang.fusion.backend",
    "sglang.fusion.workspace_preflight",
]


class Venv:
    """A serving venv with simulated packages, and a state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder.parent / "state"
        self.site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        self.python = folder / "bin" / "python"

    def install(self, sources: dict[str, str] | None = None, releases: Iterable[str] = (FLASHINFER, SGLANG)) -> Venv:
        """Write the packages and their metadata, as pip does: in place of what is there."""
        sources = SOURCES if sources is None else sources
        for name, text in sources.items():
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(text.encode())
        for release in releases:
            package, record = release.split("_", maxsplit=1)[0].split("-", maxsplit=1)[0], self.site / f"{release}.dist-info" / "RECORD"
            record.parent.mkdir(exist_ok=True)
            (record.parent / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {release.rsplit('-', 1)[0]}\nVersion: {release.rsplit('-', 1)[1]}\n"
            )
            lines = [recorded(name, self.path(name).read_bytes()) for name in sources if name.startswith(f"{package}/")]
            record.write_text("".join(lines) + f"{release}.dist-info/RECORD,,\n")
        return self

    def make_interpreter(self) -> Venv:
        """Make it a venv that can be asked."""
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.symlink_to(sys.executable)
        (self.folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
        return self

    def path(self, name: str) -> Path:
        """The path of a package's file."""
        return self.site / name

    def files(self) -> dict[str, tuple[str, int]]:
        """Everything in the venv and the state folder but the lock: contents and modes by path."""
        found = {}
        for top in (self.folder, self.state):
            for path in sorted(top.rglob("*")):
                content = os.readlink(path) if path.is_symlink() else "" if path.is_dir() else path.read_bytes().hex()
                if path != self.state / "lock":
                    found[str(path)] = (hashlib.sha256(content.encode()).hexdigest(), path.lstat().st_mode)
        return found

    def sources(self) -> dict[str, bytes]:
        """The bytes of the packages' files by name, those that do not belong there included."""
        paths = [path for top in ("flashinfer", "sglang") for path in self.path(top).rglob("*") if path.is_file() or path.is_symlink()]
        return {str(path.relative_to(self.site)): path.read_bytes() for path in paths if "__pycache__" not in path.parts}

    def snapshot(self) -> dict[Path, bytes]:
        """Every file of the packages and the state folder."""
        return {path: path.read_bytes() for top in (self.site, self.state) for path in top.rglob("*") if path.is_file()}

    def put_back(self, snapshot: dict[Path, bytes]) -> None:
        """Make the files those of ``snapshot``."""
        for path in self.snapshot().keys() - snapshot.keys():
            path.unlink()
        for path, content in snapshot.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def is_pristine(self) -> bool:
        """Whether every file is as it was installed, and nothing was added."""
        return self.sources() == {name: text.encode() for name, text in SOURCES.items()}

    def remembered(self) -> list[str]:
        """The names of the files in the state folder, but the lock and the notes on stale JIT modules, which outlive a restore."""
        files = [path for path in self.state.rglob("*") if path.is_file() and self.state / "stale" not in path.parents]
        return sorted(path.name for path in files if path.name != "lock")

    def stale(self) -> list[str]:
        """The JIT modules that are noted as stale."""
        return sorted(path.name for path in self.state.glob("stale/*/*"))

    def parameters(self, **changed: object) -> dict[str, object]:
        """Options of the module gate for it."""
        return {"site_packages": str(self.site), "compute_capability": ["12.0"], "state_dir": str(self.state), **changed}

    def gate(self, state: str = "open", check: bool = False, **changed: object) -> Result:
        """Run the module gate in this process; raises InferenceError where it fails."""
        defaults = {
            "python": None,
            "gates": None,
            "optional": False,
            "force": False,
            "untested": "open",
            "pycache_prefix": None,
            "lock_timeout": 1,
        }
        return Result(gate.run(SimpleNamespace(params={**defaults, **self.parameters(**changed), "state": state}, check_mode=check)))


def recorded(name: str, content: bytes) -> str:
    """The line of RECORD for a file."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{name},sha256={digest},{len(content)}\n"


class Scheduling(LoadScopeScheduling):
    """Any test goes to any worker, but those that share what each worker would have to make again."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if file.endswith(FILES_OF_ONE_WORKER) else nodeid


def pytest_xdist_make_scheduler(config, log) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def no_warnings_of_other_tests() -> None:
    """Ansible collects the warnings of a process, and here many modules run in one."""
    warnings._global_warnings.clear()


@pytest.fixture
def venv(tmp_path: Path) -> Iterator[Venv]:
    """A venv as it was installed, in which every gate is closed for 12.0; in memory where that is possible."""
    memory = Path("/dev/shm")  # noqa: S108
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else tmp_path) as folder:
        yield Venv(Path(folder) / "venv").install()


class Result(dict):
    """What a module returned."""

    @property
    def msg(self) -> str:
        """Its error, which is one line, never a traceback."""
        assert self.get("failed"), self
        assert "\n" not in self["msg"] and "Traceback" not in self["msg"]
        return self["msg"]

    def verdicts(self, key: str = "verdict") -> dict[str, str]:
        """The verdict on each gate."""
        return {gate["id"]: gate[key] for gate in self["gates"]}


def run_module(name: str, options: dict[str, object], *, check: bool = False, environment: dict[str, str] | None = None, **popen) -> Result:
    """Run a real module as Ansible does: a program of its own that reads its options from standard input."""
    arguments = {"ANSIBLE_MODULE_ARGS": {**options, "_ansible_check_mode": check, "_ansible_diff": True}}
    done = subprocess.run(
        [sys.executable, str(MODULES / f"{name}.py")],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(COLLECTIONS), **(environment or {})},
        **popen,
    )
    assert done.stdout, done.stderr
    return Result(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def run_here(capsys) -> Callable[..., Result]:
    """Run a module in this process, where what it calls can be replaced."""

    def run(module: ModuleType, options: dict[str, object], *, check: bool = False) -> Result:
        with patch_module_args({**options, "_ansible_check_mode": check, "_ansible_diff": True}), pytest.raises(SystemExit):
            module.main()
        return Result(json.loads(capsys.readouterr().out))

    return run


def program(path: Path, body: str, interpreter: str = "/bin/sh") -> str:
    """Write a script that can be run; return its path."""
    path.write_text(f"#!{interpreter}\n{body}\n")
    path.chmod(0o755)
    return str(path)
