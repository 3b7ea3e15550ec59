# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""When a server is stopped, and when gates are put back: the conditions of the tasks, templated as Ansible does; no play is run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from ansible_collections.blackwell.inference.tests.unit.playbook import ROOT

WIRING = ROOT / "playbooks/vars/wiring.yml"
FILES = {"site": ROOT / "playbooks/site.yml", "way_back": ROOT / "roles/sglang_server/tasks/way_back.yml"}
# variable -> the task whose condition it is
TASKS = {
    "stops_to_install": ("site", "Stop a server whose packages change"),
    "stops_to_measure": ("site", "Stop a server that has to be restarted, or measured again"),
    "measures": ("site", "Measure fused allreduce"),
    "puts_gates_back": ("way_back", "Put the gates back"),
}
BASE = {
    "inventory_hostname": "host",
    "hostvars": {"host": {}},
    "ansible_run_tags": ["all"],
    "ansible_skip_tags": [],
    "gpu_host_gpus": {"count": 8},
    "fusion_gates_result": {"changed": False},
    "serving_venv_result": {"changed": False, "in_use": False},
}


def tasks(items: list) -> Iterator[dict]:
    """All tasks of a play or a file, those in blocks included."""
    for item in items:
        yield item
        for part in ("tasks", "block", "rescue", "always"):
            yield from tasks(item.get(part, []))


@pytest.fixture(scope="module")
def true(tmp_path_factory):
    """Return a function that tells which of TASKS would run with these variables."""
    content = {name: yaml.safe_load(path.read_text()) for name, path in FILES.items()}
    own = dict(content["site"][0]["vars"])
    for variable, (file, name) in TASKS.items():
        [found] = (item["when"] for item in tasks(content[file]) if item["name"] == name)
        own[variable] = "{{ " + " and ".join(f"({part.strip()})" for part in ([found] if isinstance(found, str) else found)) + " }}"
    path = tmp_path_factory.mktemp("conditions") / "vars.yml"
    path.write_text(yaml.safe_dump(own))
    command = [sys.executable, ROOT / "tests/unit/roles/templated.py", ROOT / "roles/sglang_server", WIRING, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:

        def value_of(variable: str, **given: object) -> bool:
            print(json.dumps([variable, {**BASE, **given}]), file=program.stdin, flush=True)
            return json.loads(program.stdout.readline())

        yield value_of
        program.stdin.close()


STALE = {"fusion_proof_result": {"changed": False, "status": "stale"}}


@pytest.mark.parametrize(
    ("given", "stops", "measures"),
    [
        ({}, False, False),
        (STALE, True, True),
        ({"fusion_proof_result": {"changed": False, "status": "missing"}}, True, True),
        ({"fusion_proof_result": {"changed": False, "status": "kept"}}, False, False),
        ({"fusion_proof_result": {"changed": False, "status": "refused"}}, False, False),  # somebody else is in the way
        ({**STALE, "sglang_server_manage_service": False}, False, True),
        ({**STALE, "sglang_server_allreduce": "fusion"}, False, True),  # whatever it says, nothing follows
        ({**STALE, "ansible_run_tags": ["prove"]}, False, True),
        ({**STALE, "ansible_run_tags": ["prove", "restart"]}, True, True),
        ({**STALE, "ansible_run_tags": ["configure", "restart"]}, False, False),
        ({**STALE, "ansible_skip_tags": ["restart"]}, False, True),
        ({"fusion_gates_result": {"changed": True, "restart_required": True}}, True, False),
        ({"fusion_gates_result": {"changed": False, "stale_jit_modules": ["trtllm_comm"]}}, True, False),
        ({"serving_venv_result": {"changed": True}}, True, False),
        ({"serving_venv_result": {"changed": True}, "gpu_host_gpus": {"count": 0}}, False, False),
        (
            {
                "serving_venv_result": {"changed": True},
                "gpu_host_gpus": {"count": 0},
                "hostvars": {"host": {"sglang_server_gpu_count": "8"}},
            },
            True,
            False,
        ),
    ],
)
def test_a_server_is_stopped_where_it_is_restarted_or_measured_again(true, given, stops, measures):
    assert (true("stops_to_measure", **given), true("measures", **given)) == (stops, measures)


def test_what_stops_it_restarts_it(true):
    for name in ("site_stopped_to_install", "site_stopped_to_measure"):
        assert true("sglang_server_restart_required", **{name: {"changed": True}})
    assert not true("sglang_server_restart_required", site_stopped_to_install={"changed": False, "skipped": True})


def test_the_look_knows_whether_the_server_is_stopped(true):
    assert true("fusion_proof_stops")
    assert not true("fusion_proof_stops", sglang_server_allreduce="fusion")
    assert true("fusion_proof_stops", sglang_server_allreduce="fusion", fusion_gates_result={"changed": True, "restart_required": True})
    assert not true("fusion_proof_stops", ansible_run_tags=["prove"])


@pytest.mark.parametrize(("tags", "stops"), [(["all"], True), (["install"], False), (["install", "restart"], True)])
def test_packages_change_under_no_server_that_is_not_started_again(true, tags, stops):
    in_use = {"serving_venv_result": {"changed": False, "in_use": True}, "ansible_run_tags": tags}
    assert true("stops_to_install", **in_use) is stops
    assert true("serving_venv_unit", **in_use) == ("sglang.service" if stops else "")
    assert not true("stops_to_install", ansible_run_tags=tags)


GOOD, STATE = "/var/lib/blackwell-inference/servers", "/var/lib/blackwell-inference"


@pytest.mark.parametrize(
    ("then", "now", "of_venv", "puts_back"),
    [
        (False, True, ["sglang"], True),
        (False, True, ["sglang", "second"], False),  # which may need them
        (False, True, [], False),  # it was healthy in another venv
        (True, True, ["sglang"], False),
        (True, False, ["sglang", "second"], True),
        (False, False, ["sglang"], False),
    ],
)
def test_the_way_back_takes_no_gates_from_others(true, then, now, of_venv, puts_back):
    found = [f"{GOOD}/sglang/unit", *([f"{GOOD}/sglang/gates"] if then else []), *([f"{STATE}/gates.sha256"] if now else [])]
    listed = {
        name: {"files": [{"path": path} for path in paths]}
        for name, paths in (("sglang_server_found", found), ("sglang_server_of_venv", [f"{GOOD}/{name}/unit" for name in of_venv]))
    }
    assert true("puts_gates_back", **listed, sglang_server_health={"state": "hung"}) is puts_back
