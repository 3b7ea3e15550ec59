# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long it takes to open all gates of a host: one call of the module `gate`, and the same edits with core modules.

    make benchmark

The reference is a playbook that leaves the same bytes in the same files, written with care: each file is looked at and kept
as it was, each place is counted before it is replaced (a replacement that finds nothing says nothing), and the result is
compiled and looked at again. It does less than the module all the same: it knows the edits beforehand, evaluates no gate, is
no transaction, and does not see an upgrade. The same without care, a replacement for each place and nothing else, is shown too.
They run in turn, over `connection: local` and over ssh to this machine (with a private sshd and a key that are
gone afterwards), and so does a playbook without tasks, to tell Ansible's own start from the work.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ansible
import yaml
from ansible_collections.blackwell.inference.tests.corpus.host import CHECKOUT, Host
from ansible_collections.blackwell.inference.tests.corpus.releases import Pair

PAIR = Pair("0.5.14", "0.6.9")  # every kind of gate is closed in it
ANSIBLE = Path(sys.executable).parent / "ansible-playbook"


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with TemporaryDirectory(prefix="blackwell-benchmark-") as name:
        folder = Path(name)
        host = Host(folder, PAIR)
        host.gate("12.0")
        edited = host.files()
        put_back(host)
        playbooks = {
            "one gate call": gate_tasks(host),
            "core modules": core_tasks(host, edited, careful=True),
            "core, carelessly": core_tasks(host, edited, careful=False),
            "no task": [],
        }
        paths = {title: write(folder / f"{index}.yml", tasks) for index, (title, tasks) in enumerate(playbooks.items())}
        print(f"sglang {PAIR.sglang} with flashinfer {PAIR.flashinfer}; ansible-core {ansible.__version__}, ", end="")
        print(f"Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds, median seconds (least - most)")
        for connection, variables in (("local", {"ansible_connection": "local"}), ("ssh", None)):
            with sshd(folder) if variables is None else given(variables) as how:
                if how is None:
                    print(f"{connection:5}  there is no sshd here: install openssh-server to measure this as well")
                    continue
                seconds: dict[str, list[float]] = {title: [] for title in paths}
                for _round in range(rounds):
                    for title, path in paths.items():
                        seconds[title].append(run(path, how))
                        found = {name: content for name, content in host.files().items() if not name.endswith(".orig")}
                        assert found == (host.pristine if title == "no task" else edited), f"{title}: other bytes"
                        put_back(host)
                show(connection, seconds, {title: len(tasks) for title, tasks in playbooks.items()})


def gate_tasks(host: Host) -> list[dict[str, Any]]:
    """The one task."""
    options = {"site_packages": str(host.site), "state_dir": str(host.state), "compute_capability": ["12.0"]}
    return [{"name": "Open the gates", "blackwell.inference.gate": options}]


def core_tasks(host: Host, edited: dict[str, bytes], careful: bool) -> list[dict[str, Any]]:
    """The same edits with core modules."""
    tasks: list[dict[str, Any]] = []
    for name, content in edited.items():
        if content == host.pristine[name]:
            continue
        path = str(host.site / name)
        look = {"name": f"Look at {name}", "ansible.builtin.stat": {"path": path}}
        keep = {
            "name": f"Keep {name}",
            "ansible.builtin.copy": {"src": path, "dest": f"{path}.orig", "remote_src": True, "mode": "preserve"},
        }
        edits = []
        for old, new in hunks(host.pristine[name].decode(), content.decode()):
            options = {"path": path, "regexp": f"(?<![^\\n]){re.escape(old)}", "replace": new.replace("\\", "\\\\")}
            edits += [python(f"Count the place in {name}", COUNT, path, old)] if careful else []
            edits.append({"name": f"Edit {name}", "ansible.builtin.replace": options})
        tasks += [look, keep, *edits, python(f"Check that {name} compiles", COMPILES, path), look] if careful else edits
    return tasks


COUNT = "import sys; sys.exit(open(sys.argv[1]).read().count(sys.argv[2]) != 1)"
COMPILES = "import ast, sys; ast.parse(open(sys.argv[1]).read())"


def python(name: str, program: str, *arguments: str) -> dict[str, Any]:
    """A command task that changes nothing."""
    return {"name": name, "ansible.builtin.command": {"argv": [sys.executable, "-c", program, *arguments]}, "changed_when": False}


def hunks(before: str, after: str) -> Iterator[tuple[str, str]]:
    """The places that differ, as whole lines with three around them, which are found only once."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(3):
        found = "".join(old[group[0][1] : group[-1][2]])
        assert before.count(found) == 1, found
        yield found, "".join(new[group[0][3] : group[-1][4]])


def write(path: Path, tasks: list[dict[str, Any]]) -> Path:
    """A playbook with ``tasks``."""
    play = {"name": "Open the gates", "hosts": "all", "gather_facts": False, "tasks": tasks}
    path.write_text(yaml.safe_dump([play], sort_keys=False), encoding="utf-8")
    return path


def run(playbook: Path, variables: dict[str, Any]) -> float:
    """Seconds that a playbook takes."""
    inventory = playbook.with_name("inventory.yml")
    variables = {"ansible_python_interpreter": sys.executable, **variables}
    inventory.write_text(yaml.safe_dump({"all": {"hosts": {"benchmark": variables}}}), encoding="utf-8")
    start = time.perf_counter()
    done = subprocess.run([ANSIBLE, "-i", inventory, playbook], cwd=CHECKOUT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stdout + done.stderr
    return seconds


def put_back(host: Host) -> None:
    """Undo everything, without the module."""
    for name, content in host.pristine.items():
        path = host.site / name
        if path.read_bytes() != content:
            path.write_bytes(content)
    for path in host.site.rglob("*.orig"):
        path.unlink()
    shutil.rmtree(host.state, ignore_errors=True)


def show(connection: str, seconds: dict[str, list[float]], tasks: dict[str, int]) -> None:
    """Print one connection's figures."""
    start = statistics.median(seconds["no task"])
    for title, values in seconds.items():
        middle = statistics.median(values)
        work = "" if title == "no task" else f", of which {middle - start:.2f} s work"
        print(f"{connection:5}  {title:16}  {tasks[title]:2} tasks  {middle:6.2f} s ({min(values):.2f} - {max(values):.2f}){work}")
    one, many = (statistics.median(seconds[title]) for title in ("one gate call", "core modules"))
    print(f"{connection:5}  ratio {many / one:.1f} as a whole, {(many - start) / (one - start):.1f} without Ansible's start")


@contextmanager
def given(variables: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``variables`` themselves."""
    yield variables


@contextmanager
def sshd(folder: Path) -> Iterator[dict[str, Any] | None]:
    """Connection variables for a private sshd on the loopback interface, or None where there is no sshd."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        yield None
        return
    key, host_key, config = folder / "key", folder / "host_key", folder / "sshd_config"
    for path in (key, host_key):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config.write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {host_key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\nUsePAM no\n"
        "PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n",
        encoding="utf-8",
    )
    separation = Path("/run/sshd")  # where sshd run as root wants an empty folder
    made = os.geteuid() == 0 and not separation.exists()
    if made:
        separation.mkdir(mode=0o755)
    server = subprocess.Popen([program, "-D", "-e", "-f", config], stderr=subprocess.DEVNULL)
    try:
        wait_for(port, server)
        arguments = f"-o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no -o LogLevel=ERROR -o ControlPath={folder}/control"
        yield {
            "ansible_connection": "ssh",
            "ansible_host": "127.0.0.1",
            "ansible_port": port,
            "ansible_ssh_private_key_file": str(key),
            "ansible_ssh_common_args": arguments,
        }
        subprocess.run(["ssh", "-O", "exit", *arguments.split(), "127.0.0.1"], capture_output=True, check=False)
    finally:
        server.terminate()
        server.wait()
        if made:
            separation.rmdir()


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Wait until ``server`` listens."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    sys.exit("sshd does not start here")


if __name__ == "__main__":
    main()
