# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Two servers share a host and its opened gates, and neither its GPUs nor its ports."""

import pytest

testinfra_hosts = ["ansible://blackwell-pair"]


@pytest.mark.parametrize(("name", "port", "gpus"), [("first", 30000, "0,1,2,3"), ("second", 30100, "4,5,6,7")])
def test_each_serves_on_its_own_gpus(host, name, port, gpus):
    found = host.ansible("blackwell.inference.server_health", f"unit={name}.service url=http://127.0.0.1:{port} timeout=0", check=False)
    assert found["state"] == "ready"
    assert found["server"]["tp_size"] == 4
    assert found["server"]["fusion"] == "active"
    assert f"CUDA_VISIBLE_DEVICES={gpus}" in host.check_output("systemctl show --property Environment %s.service", name)


def test_a_third_one_on_the_same_port_is_refused(host):
    host.check_output("sed 's/30100/30000/' /etc/sglang/second.yaml > /etc/sglang/third.yaml")
    host.check_output("sed 's/second/third/g; s/30100/30000/' /etc/systemd/system/second.service > /etc/systemd/system/third.service")
    host.check_output("cp /etc/sglang/second.env /etc/sglang/third.env")
    assert host.run("systemctl start third.service").failed
    found = host.ansible("blackwell.inference.server_health", "unit=third.service url=http://127.0.0.1:30200 timeout=30", check=False)
    assert (found["state"], found["diagnosis"]["signature"]) == ("failed", "preflight-refused")
    assert "port 30000 is in use" in found["diagnosis"]["line"]
