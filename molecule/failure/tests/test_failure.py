# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""With the cause removed, the run that had failed succeeds; and a server that is killed while it loads is found dead at once."""

testinfra_hosts = ["ansible://blackwell-failure"]


def test_the_server_fuses(health):
    assert health["state"] == "ready"
    assert health["server"]["fusion"] == "active"


def test_a_server_that_is_killed_while_it_loads_is_reported_at_once(host):
    host.check_output("echo LOAD_SECONDS=60 > /etc/simulated-engine")
    host.check_output("systemctl restart sglang")
    host.check_output("timeout 20 sh -c 'until pgrep sim:TP7; do sleep 0.2; done'")
    host.check_output("systemctl kill --kill-who=main --signal=KILL sglang")
    found = host.ansible("blackwell.inference.server_health", "unit=sglang.service timeout=50", check=False)
    assert found["state"] == "failed"
    assert found["seconds"] < 10
    assert "killed by signal 9" in found["diagnosis"]["meaning"]


def test_the_reason_is_found_too_while_systemd_waits_to_start_it_again(host):
    host.check_output("echo LOAD_SECONDS=1 > /etc/simulated-engine")
    host.check_output("sed --in-place 's/mem-fraction-static: .*/mem-fraction-static: 0.99/' /etc/sglang/sglang.yaml")
    host.check_output("systemctl restart sglang")
    host.check_output("timeout 20 sh -c 'until systemctl show --property SubState sglang | grep auto-restart; do sleep 0.2; done'")
    host.check_output("sleep 2")
    found = host.ansible("blackwell.inference.server_health", "unit=sglang.service timeout=0", check=False)
    assert found["state"] == "failed"
    assert found["diagnosis"]["signature"] == "gpu-memory"
