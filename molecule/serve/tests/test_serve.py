# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From nothing to a healthy TP8 server with fusion on all ranks, and an API key that nobody sees."""

import re

import pytest

testinfra_hosts = ["ansible://blackwell-serve"]

KEY = "simulated-key-7f3a91"
TOKEN = "simulated-token-5b20"  # noqa: S105  as simulated as the key
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


def test_secrets_are_in_files_that_nobody_else_reads_and_nowhere_else(host):
    config = host.file("/etc/sglang/sglang.yaml")
    assert (config.user, config.group, config.mode) == ("root", "sglang", 0o640)
    kept = "/var/lib/blackwell-inference/servers/sglang"  # for the way back
    assert host.file(kept).mode == 0o700
    places = "/etc /var/lib /var/cache /var/log /var/tmp /run/systemd /run/log /root /tmp"
    found = host.run(f"grep --recursive --files-with-matches --regexp {KEY} --regexp {TOKEN} {places}")
    assert sorted(found.stdout.split()) == ["/etc/sglang/sglang.env", "/etc/sglang/sglang.yaml", f"{kept}/config", f"{kept}/environment"]
    assert {host.file(f"{kept}/{name}").mode for name in ("config", "environment")} == {0o600}


def test_a_secret_variable_is_in_one_file_that_root_alone_reads_and_reaches_the_server(host):
    file = host.file("/etc/sglang/sglang.env")
    assert (file.user, file.group, file.mode) == ("root", "root", 0o600)
    process = host.check_output("systemctl show --property MainPID --value sglang")
    assert f"HF_TOKEN={TOKEN}" in host.check_output("tr '\\0' '\\n' < /proc/%s/environ", process).splitlines()
    assert TOKEN not in host.check_output("systemctl show sglang")


def test_as_many_compilers_as_fit(host):
    process = host.check_output("systemctl show --property MainPID --value sglang")
    [jobs] = [line for line in host.check_output("tr '\\0' '\\n' < /proc/%s/environ", process).splitlines() if line.startswith("MAX_JOBS=")]
    assert 1 <= int(jobs.partition("=")[2]) <= int(host.check_output("nproc"))


def test_the_key_is_in_no_process_and_no_log(host):
    def processes_with(text):  # as a pattern that the command line that searches for it does not match
        pattern = f"[{text[0]}]{text[1:]}"
        return host.run("grep --text --files-with-matches %s /proc/[0-9]*/cmdline /proc/[0-9]*/environ", pattern).stdout.split()

    assert processes_with(KEY) == []
    assert len(processes_with("/etc/sglang/launch.py")) == 9  # it would be found: in the server and its ranks
    assert all(path.endswith("/environ") for path in processes_with(TOKEN))
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
    processes = "pgrep --full '[s]glang/launch.py'"
    assert len(host.check_output(processes).split()) == 9
    host.check_output("systemctl stop sglang")
    assert host.run(processes).stdout == ""
    host.check_output("systemctl start sglang")
