# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils import _starting_servers
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError
from ansible_collections.blackwell.inference.plugins.module_utils._starting_servers import refuse_starting_server, started_before


@contextlib.contextmanager
def process(program: object, *words: str):
    """A process with this command line; its program is whatever ``program`` names."""
    code = """if True:
        import ctypes, sys, time
        loaded = [ctypes.CDLL(path) for path in sys.argv[1:] if path.endswith(".so")]
        print("up", flush=True)
        time.sleep(60)
    """
    arguments = [str(program), "-c", code, *words]
    child = subprocess.Popen(arguments, executable=sys.executable, stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_server_of_the_venv_that_is_starting_is_in_the_way(venv):
    (venv.python.parents[1] / "pyvenv.cfg").touch()
    with process(venv.python, "-m", "sglang.launch_server", "--api-key", "secret") as server:
        with pytest.raises(InferenceError, match=rf"^{venv.site}: pid {server.pid} \(.*started \d+ s ago; .*Nothing was changed") as raised:
            refuse_starting_server(str(venv.site))
        assert "secret" not in str(raised.value)


def test_one_that_has_settled_is_not(venv, monkeypatch):
    monkeypatch.setattr(_starting_servers, "SETTLED_AFTER_SECONDS", 0.01)
    with process(venv.python, "-m", "sglang.launch_server"):
        time.sleep(0.1)
        refuse_starting_server(str(venv.site))


def test_a_rank_is_known_by_the_libraries_that_it_has_loaded(venv):
    library = venv.path("torch") / "lib.so"
    library.parent.mkdir()
    library.write_bytes(_library().read_bytes())
    with process("sglang::scheduler_TP3", str(library)), pytest.raises(InferenceError, match=r"pid \d+ \(sglang::scheduler_TP3\)"):
        refuse_starting_server(str(venv.site))


def _library() -> Path:
    """A shared library that any process can load."""
    maps = Path("/proc/self/maps").read_text().split()
    return next(Path(word) for word in maps if "/libm" in word or "/lib-dynload/" in word)


@pytest.mark.parametrize(
    "words",
    [
        ("/opt/other/bin/python", "-m", "sglang.launch_server"),  # another venv
        ("{venv}/bin/python", "-m", "pip"),  # no server
        ("{venv}/bin/python", "/home/sglang/AnsiballZ_gate.py"),  # e.g. this very module
    ],
)
def test_other_processes_are_not_in_the_way(venv, words):
    with process(*(word.format(venv=venv.folder) for word in words)):
        refuse_starting_server(str(venv.site))


def test_a_venv_below_a_folder_named_sglang_does_not_make_a_server_of_its_processes(venv):
    folder = venv.folder.parent / "sglang" / "venv"
    folder.parent.mkdir()
    os.rename(venv.folder, folder)
    with process(folder / "bin" / "python", "script.py"):
        refuse_starting_server(str(folder / venv.site.relative_to(venv.folder)))


def test_a_program_of_the_system_is_no_server_of_its_site_packages(venv):
    with process(venv.python, "sglang-notes.txt"):
        refuse_starting_server(str(venv.site))


def test_a_server_goes_on_with_what_was_there_when_it_was_started(venv):
    (venv.python.parents[1] / "pyvenv.cfg").touch()
    assert venv.gate()["restart_pending"] == []
    with process(venv.python, "-m", "sglang.launch_server") as server, process("/opt/other/bin/python", "-m", "sglang.launch_server"):
        assert started_before(str(venv.site), time.time() - 30) == []
        assert [line.split()[1] for line in started_before(str(venv.site), time.time() + 30)] == [str(server.pid)]


def test_a_restart_stays_pending_until_the_server_is_restarted(venv, monkeypatch):
    monkeypatch.setattr(_starting_servers, "SETTLED_AFTER_SECONDS", 0.01)
    (venv.python.parents[1] / "pyvenv.cfg").touch()
    with process(venv.python, "-m", "sglang.launch_server") as server:
        time.sleep(0.1)
        installed = time.time() - 100
        for path in venv.site.rglob("*.*"):
            os.utime(path, (installed, installed))
        assert venv.gate(gates=["sglang.mnnvl.supported"])["restart_pending"] == []
        for result in (venv.gate(check=True), venv.gate(), venv.gate()):
            assert [line.split()[1] for line in result["restart_pending"]] == [str(server.pid)]
    assert venv.gate()["restart_pending"] == []
