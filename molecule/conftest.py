# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of the scenarios ask a test host, without the collection's own opinion wherever upstream's can be had."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

PYTHON = "/opt/sglang/venv/bin/python"
SITE = "/opt/sglang/venv/lib/python3.11/site-packages"
OPENED_IN_0_5_8 = ["flashinfer/jit/comm.py", "sglang/srt/layers/communicator.py"]

CHANGED = f"""
import base64, csv, hashlib, pathlib
site = pathlib.Path("{SITE}")
for record in site.glob("*.dist-info/RECORD"):
    for name, digest, _size in csv.reader(record.open()):
        content = (site / name).read_bytes() if (site / name).exists() else b""
        if digest and base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=") != digest.partition("=")[2]:
            print(name)
"""
ASK = """
import json, sys, urllib.request
path, body, key = json.loads(sys.argv[1])
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
request = urllib.request.Request("http://127.0.0.1:30000" + path, json.dumps(body).encode() if body else None, headers)
print(urllib.request.urlopen(request, timeout=5).read().decode())
"""


@pytest.fixture
def changed_files(host) -> list[str]:
    """The files of the wheels that are not as RECORD says, by their own digests."""
    return sorted(host.check_output("/usr/bin/python3 -c %s", CHANGED).splitlines())


@pytest.fixture
def upstream(host) -> dict[str, object]:
    """What the installed packages answer on the host's GPUs when their code is executed."""
    capability = host.check_output("nvidia-smi --query-gpu=compute_cap --format=csv,noheader").splitlines()[0]
    return json.loads(host.check_output("%s -I /opt/simulated/upstream.py %s %s", PYTHON, SITE, capability))


@pytest.fixture
def ask(host) -> Callable[..., object]:
    """Ask the server: ``ask(path, body=None, key="")``."""
    return lambda path, body=None, key="": json.loads(host.check_output("/usr/bin/python3 -c %s %s", ASK, json.dumps([path, body, key])))


@pytest.fixture
def health(host) -> dict[str, object]:
    """What the module server_health says about the running server."""
    files = "/etc/sglang/sglang.yaml,/var/lib/blackwell-inference/gates.sha256"
    return host.ansible("blackwell.inference.server_health", f"unit=sglang.service timeout=0 files={files}", check=False)


@pytest.fixture
def log(host) -> list[str]:
    """The log of the running server."""
    invocation = host.check_output("systemctl show --property InvocationID --value sglang.service")
    return host.check_output("journalctl --quiet --output cat _SYSTEMD_INVOCATION_ID=%s", invocation).splitlines()
