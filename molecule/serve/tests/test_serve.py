# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From nothing to a healthy TP8 server with fusion on all ranks, and an API key that nobody sees."""

import re

import pytest

testinfra_hosts = ["ansible://blackwell-serve"]

KEY = "simulated-key-7f3a91"
EDITED = ["flashinfer/jit/comm.py", "sglang/srt/layers/communicator.py"]


def test_the_gates_are_open_and_nothing_else_was_edited(upstream, changed_files):
    assert upstream["applies"]
    assert upstream["module"] is None
    assert changed_files == EDITED


def test_the_service_runs_and_is_enabled(host):
    service = host.service("sglang")
    assert service.is_running
    assert service.is_enabled
    assert host.check_output("systemctl show --property NRestarts --value sglang") == "0"


@pytest.mark.parametrize("rank", range(8))
def test_fusion_is_active_on_every_rank(log, rank):
    assert any(f"TP{rank}]" in line and f"FlashInfer workspace initialized for rank {rank}, world_size 8" in line for line in log)


def test_it_answers(ask):
    answer = ask("/generate", {"text": "Repeat 4711.", "sampling_params": {"max_new_tokens": 8}}, KEY)
    assert answer["text"] == " 4711"
    chat = ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "Repeat 4712."}]}, KEY)
    assert chat["choices"][0]["message"]["content"] == " 4712"


def test_the_flags_arrived(ask):
    info = ask("/server_info", key=KEY)
    assert info["tp_size"] == 8
    assert info["enable_flashinfer_allreduce_fusion"] is True
    assert info["max_running_requests"] == 1024


def test_the_key_is_in_one_file_that_only_the_service_reads(host):
    config = host.file("/etc/sglang/sglang.yaml")
    assert (config.user, config.group, config.mode) == ("root", "sglang", 0o640)
    assert KEY in config.content_string
    places = ["/etc", "/var/lib", "/var/cache", "/var/log", "/run/systemd", "/root"]
    assert host.run("grep --recursive --files-with-matches %s %s", KEY, " ".join(places)).stdout.split() == []


def test_the_key_is_in_no_process_and_no_log(host):
    pattern = f"[{KEY[0]}]{KEY[1:]}"  # which the command line that searches for it does not match
    assert host.run("grep --text --files-with-matches %s /proc/[0-9]*/cmdline /proc/[0-9]*/environ", pattern).stdout == ""
    assert KEY not in host.check_output("journalctl --quiet --output export")


def test_the_unit_is_sound_and_closed(host):
    assert host.run("systemd-analyze verify --man=no /etc/systemd/system/sglang.service").stderr == ""
    report = host.check_output("systemd-analyze security --no-pager sglang.service")
    assert float(re.search(r"exposure level for sglang.service: ([0-9.]+)", report)[1]) <= 4.0


def test_the_unit_has_its_limits(host):
    names = ["LimitMEMLOCK", "LimitSTACK", "LimitNOFILE", "KillMode", "Restart", "StartLimitBurst"]
    properties = dict(line.split("=") for line in host.check_output("systemctl show sglang --property %s", ",".join(names)).splitlines())
    assert properties == {
        "LimitMEMLOCK": "infinity",
        "LimitSTACK": "67108864",
        "LimitNOFILE": "1048576",
        "KillMode": "control-group",
        "Restart": "on-failure",
        "StartLimitBurst": "3",
    }


def test_all_ranks_end_with_the_service(host):
    host.check_output("systemctl stop sglang")
    assert host.run("pgrep --full [s]glang.launch_server").stdout == ""
    host.check_output("systemctl start sglang")
