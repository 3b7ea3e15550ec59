# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module as Ansible runs it, with a server on the loopback address and stand-ins for systemctl and journalctl."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ansible_collections.blackwell.inference.plugins.module_utils._health import Answer
from ansible_collections.blackwell.inference.plugins.module_utils._health_host import LocalHost, Target
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

MODULE = Path(__file__).parents[4] / "plugins" / "modules" / "server_health.py"
KEY = "a-key-to-be-told-to-nobody"
RUNNING = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": 0, "Result": "success"}
FAILED = {**RUNNING, "ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "ExecMainCode": 1, "ExecMainStatus": 2}


class Server(BaseHTTPRequestHandler):
    """Answers as sglang does: no key for /health, one for the rest."""

    def reply(self, status, data):
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self):
        if self.headers.get("Authorization") == f"Bearer {KEY}":
            return True
        self.reply(401, {})
        return False

    def do_GET(self):
        if self.path == "/health":
            self.reply(200, {})
        elif self.path == "/server_info" and self.allowed():
            self.reply(200, {"version": "0.5.23", "model_path": "m", "tp_size": 1, "api_key": KEY})

    def do_POST(self):
        if self.server.hang:
            self.send_response(200)
            self.end_headers()
            for _second in range(100):
                time.sleep(0.1)
                self.wfile.write(b"x" if self.server.drip else b"")
        elif self.allowed():
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(200, {"text": " 42", "meta_info": {"completion_tokens": 8}})

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as listening:
        listening.hang = listening.drip = False
        listening.daemon_threads = True
        listening.block_on_close = False
        threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
        listening.url = f"http://127.0.0.1:{listening.server_port}"
        yield listening
        listening.shutdown()


@pytest.fixture
def tools(tmp_path):
    """Return a function that puts a systemctl and a journalctl with given answers on a PATH of their own."""

    def install(unit, lines=()):
        folder = tmp_path / "bin"
        folder.mkdir()
        journal = "\n".join(json.dumps({"__CURSOR": "c", "MESSAGE": line}) for line in lines)
        answers = {"systemctl": "\n".join(f"{key}={value}" for key, value in unit.items()), "journalctl": journal}
        for name, answer in answers.items():
            (tmp_path / name).write_text(answer)
            # after a cursor there is nothing new
            (folder / name).write_text(f'#!/bin/sh\ncase "$*" in *--after-cursor*) ;; *) cat {tmp_path / name} ;; esac\n')
            (folder / name).chmod(0o755)
        return f"{folder}:/usr/bin:/bin"

    return install


def run(path="/usr/bin:/bin", **options):
    environment = {"PYTHONPATH": str(MODULE.parents[2] / ".venv" / "collections"), "PATH": path, "http_proxy": "http://127.0.0.1:1"}
    arguments = json.dumps({"ANSIBLE_MODULE_ARGS": options})
    done = subprocess.run([sys.executable, MODULE], input=arguments, capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    assert KEY not in done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("check", [False, True])
def test_a_server_is_ready_without_systemd(server, check):
    result = run(url=server.url, api_key=KEY, timeout=10, canary=2, _ansible_check_mode=check)
    assert (result["changed"], result["state"], result["diagnosis"]) == (False, "ready", None)
    assert result["server"] == {"version": "0.5.23", "model_path": "m", "tp_size": 1, "fusion": "off"}


def test_a_key_that_the_server_refuses_is_told(server):
    result = run(url=server.url, timeout=10)
    assert result["failed"] is True
    assert result["msg"] == "api_key: the server answers 401; expected the key that the server was started with."


def test_a_dead_server_is_explained_from_its_log(tools):
    lines = [
        f"server_args=ServerArgs(api_key='{KEY}', admin_api_key='other')",
        "RuntimeError: No supported CUDA architectures found for major versions [9, 10].",
        f"Received sigquit from a child process; the key was {KEY}",
    ]
    result = run(tools(FAILED, lines), unit="sglang.service", url="http://127.0.0.1:1", api_key=KEY, timeout=60)
    assert result["state"] == "failed"
    assert result["diagnosis"]["signature"] == "fusion-module-closed"
    assert "ansible-playbook blackwell.inference.site -l HOST" in result["msg"]
    assert result["seconds"] < 5


def test_secrets_in_log_lines_are_starred_out(tools):
    result = run(tools(FAILED, ["ValueError: api_key='other' is no key"]), unit="sglang.service", url="http://127.0.0.1:1", timeout=0)
    assert result["diagnosis"]["line"] == "ValueError: api_key='********' is no key"


def test_a_long_log_is_read_at_its_beginning_and_at_its_end(tools, tmp_path):
    path = tools({**FAILED, "InvocationID": "4f2a", "Id": "sglang.service"})
    journalctl = """#!/bin/sh
echo "$*" >> "$0.asked"
case "$*" in
  *--after-cursor*) ;;
  *--lines=*) echo '{"__CURSOR": "end", "MESSAGE": "RuntimeError: GEMM initialization failed"}' ;;
  *) yes '{"__CURSOR": "c", "MESSAGE": "Decode batch, #running-req: 3"}' ;;
esac
"""
    (tmp_path / "bin/journalctl").write_text(journalctl)
    result = run(path, unit="sglang", url="http://127.0.0.1:1", timeout=0)
    assert result["diagnosis"]["signature"] == "moe-gemm-not-usable"
    first, second, third = (tmp_path / "bin/journalctl.asked").read_text().splitlines()
    # those of the last start, which systemd may already have ended
    assert first.endswith("_SYSTEMD_INVOCATION_ID=4f2a + INVOCATION_ID=4f2a + _TRANSPORT=kernel")
    assert "--lines=5000" in second
    assert "--after-cursor=end _SYSTEMD_UNIT=sglang.service + UNIT=sglang.service" in third


def test_a_line_of_endless_length_is_cut(tools):
    long = f"RuntimeError: GEMM initialization failed {'x' * 100_000}"
    result = run(tools(FAILED, [long]), unit="sglang.service", url="http://127.0.0.1:1", timeout=0)
    assert len(result["diagnosis"]["line"]) == 4000


def test_an_address_that_nobody_answers_at_is_not_taken_for_a_hang():
    """Whoever does not take the connection has taken no request."""

    def connect(connection):
        raise TimeoutError("timed out")

    host = LocalHost(Target("http://192.0.2.1:1", None, None, None, None, True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("http.client.HTTPConnection.connect", connect)
        assert host.request("/health", None, 0.5) == Answer(None, b"", "timed out")


@pytest.mark.parametrize("drip", [False, True])
def test_an_answer_that_takes_too_long_is_none(server, drip):
    server.hang, server.drip = True, drip
    host = LocalHost(Target(server.url, None, None, None, None, True))
    began = time.monotonic()
    assert host.request("/generate", {}, 0.5) == Answer(None, b"", "timeout")
    assert time.monotonic() - began < 2
    assert host.request("/health", None, 0.5).status == 200


def test_files_newer_than_the_start_are_pending(server, tools, tmp_path):
    started = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 100) * 1e6)
    gates = [("venv/opened.py", 10), ("venv/closed.py", 1000), ("venv2/opened.py", 10)]
    for name, age in (("old", 1000), ("new", 10), *gates, ("gates.sha256", 10)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / "gates.sha256").write_text("".join(f"{'0' * 64}  {tmp_path / name}\n" for name, _age in gates))
    files = [str(tmp_path / name) for name in ("old", "new", "absent", "gates.sha256")]
    path = tools({**RUNNING, "InactiveExitTimestampMonotonic": started})
    options = {"unit": "sglang.service", "url": server.url, "api_key": KEY, "files": files}
    pending = [str(tmp_path / name) for name in ("new", "venv/opened.py", "venv2/opened.py")]
    assert run(path, **options)["restart_pending"] == pending
    assert run(path, **options, python=str(tmp_path / "venv/bin/python"))["restart_pending"] == pending[:2]
    (tmp_path / "linked").symlink_to("venv2")
    assert run(path, **options, python=str(tmp_path / "linked/bin/python"))["restart_pending"] == pending[::2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:30000"}, "url: found 127.0.0.1:30000; expected an address such as http://127.0.0.1:30000."),
        ({"interval": 2}, "interval: found 2; expected 6 or more."),
        ({"timeout": -1}, "timeout: found -1; expected 0 or more."),
        ({"ca_path": "/does/not/exist"}, "ca_path: /does/not/exist cannot be used (No such file or directory); expected a file of PEM"),
        ({"unit": "sglang.service"}, "unit: systemd says not-found for sglang.service; expected a unit that is loaded."),
    ],
)
def test_wrong_options_are_told_in_one_line(options, message, tools):
    result = run(tools({"LoadState": "not-found"}), **options)
    assert result["failed"] is True
    assert result["msg"].startswith(message)
    assert "\n" not in result["msg"]


def test_a_host_without_systemd_is_told(tmp_path):
    assert run(str(tmp_path), unit="sglang.service")["msg"].startswith("unit: systemctl is not on this host; expected a host with systemd.")


@pytest.fixture
def certificate(tmp_path):
    """Make a certificate for the loopback address and return the file that holds it and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1)).add_extension(address, critical=False)
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = tmp_path / "server.pem"
    path.write_bytes(private + builder.sign(key, hashes.SHA256()).public_bytes(encoding))
    return path


def test_tls_is_checked_unless_told_otherwise(server, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = server.url.replace("http:", "https:")
    assert run(url=url, api_key=KEY, timeout=0)["state"] == "starting"
    assert run(url=url, api_key=KEY, timeout=0, ca_path=str(certificate))["state"] == "ready"
    assert run(url=url, api_key=KEY, timeout=0, validate_certs=False)["state"] == "ready"
