# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
import signal

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._audit_files import Buffer, on_every_core, sources
from ansible_collections.blackwell.inference.plugins.module_utils._errors import InferenceError

ITEMS = [str(number) for number in range(500)]


@pytest.fixture(params=[1, 2, 5], ids="{}-cores".format)
def cores(request, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(request.param)))
    return request.param


def test_every_item_is_worked_on_once(cores):
    def work(share, exchange):
        everybody = exchange(len(share))
        return os.getpid(), sum(everybody), share

    results = on_every_core(work, ITEMS)
    assert len({pid for pid, _total, _share in results}) == cores == len(results)
    assert {total for _pid, total, _share in results} == {len(ITEMS)}
    assert sorted(item for _pid, _total, share in results for item in share) == sorted(ITEMS)


def test_an_error_in_any_process_is_raised_here(cores):
    def work(share, exchange):
        if "499" in share:
            raise InferenceError("499", "wrong", "another")
        exchange(None)

    with pytest.raises(InferenceError, match="499: wrong; expected another"):
        on_every_core(work, ITEMS)


def test_an_error_after_the_exchange_is_raised_here(cores):
    def work(share, exchange):
        exchange(None)
        if "499" in share:
            raise InferenceError("499", "wrong", "another")

    with pytest.raises(InferenceError, match="499: wrong"):
        on_every_core(work, ITEMS)


def test_a_process_that_is_killed_is_an_error(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0, 1})
    parent = os.getpid()

    def work(share, exchange):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(None)

    with pytest.raises(InferenceError, match="ended early"):
        on_every_core(work, ITEMS)


def test_no_process_is_left_behind(cores):
    on_every_core(lambda share, exchange: exchange(share), ITEMS)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_buffer_grows(tmp_path):
    path, buffer = tmp_path / "a", Buffer()
    for size in (0, 10, (1 << 20) - 1, 1 << 20, 5 << 20, 3):
        path.write_bytes(os.urandom(size))
        assert buffer.read(str(path)) == size and buffer.raw[:size] == path.read_bytes()


def test_sources(tmp_path):
    for name in ("a.py", "b.cu", "c/d.cuh", "c/e.hpp", "c/test_e.py", "tests/f.py", "c/g.so", "c/h.txt", "c/conftest.py", "c/i_test.py"):
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).touch()
    (tmp_path / "package" / "loop").symlink_to(tmp_path / "package")
    assert sorted(sources(str(tmp_path), "package")) == ["package/a.py", "package/b.cu", "package/c/d.cuh", "package/c/e.hpp"]
