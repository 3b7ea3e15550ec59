# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A simulated engine: ``python -m sglang.launch_server`` for a host without GPUs.

Upstream's parser of the installed release reads the options, upstream's gates (see upstream.py) decide what fusion does,
and the log says what upstream says. Only the work of a GPU is made up. SETTINGS, a file of NAME=VALUE lines, says how:

    LOAD_SECONDS     how long loading the model takes (1)
    COMPILE_SECONDS  how long a JIT module takes to compile where it is not in the cache (1)
    HANG             when ranks hang, so that no request is answered: never, always, or fusion, while fusion is active (never)
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import logging
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SETTINGS = Path("/etc/simulated-engine")
SITE = sysconfig.get_paths()["purelib"]
HIGHEST_MEMORY_FRACTION = 0.95  # above, weights and KV cache leave nothing for the graphs
ROUTE = re.compile(r'@app\.(?:get|post|api_route)\(\s*"(/[\w/]+)"')

logger = logging.getLogger("sglang.srt.entrypoints.engine")  # upstream's name for it


def main(arguments: list[str]) -> None:
    """Run the server until it is stopped or dies."""
    options = parse(arguments)
    configure_log("")
    logger.warning("This engine is simulated: it has no model and uses no GPU.")
    logger.info("server_args=ServerArgs(%s)", ", ".join(f"{name}={value!r}" for name, value in options.items()))
    engine = Engine(options)
    signal.signal(signal.SIGQUIT, lambda *_: engine.die("Received sigquit from a child process. It usually means the child failed."))
    signal.signal(signal.SIGTERM, lambda *_: engine.stop())
    engine.start_ranks()
    server = Server((options["host"], options["port"]), engine)
    logger.info("Uvicorn running on http://%s:%s (Press CTRL+C to quit)", options["host"], options["port"])
    threading.Thread(target=engine.watch_ranks, daemon=True).start()
    logger.info("The server is fired up and ready to roll!")
    server.serve_forever()


def parse(arguments: list[str]) -> dict[str, object]:
    """Return the options as the installed release's own parser reads them; end as it does where it refuses one."""
    config = None
    if "--config" in arguments:
        at = arguments.index("--config")
        config, arguments = arguments[at + 1], arguments[:at] + arguments[at + 2 :]
    request = json.dumps({"argv": arguments, "config": config})
    answer = json.loads(ask(["/usr/bin/python3", "-I", str(HERE / "sglang_parser.py"), SITE], request))
    if answer["error"]:
        print(f"launch_server.py: error: {answer['error']}", file=sys.stderr)
        raise SystemExit(2)
    # ServerArgs has other names for these than the flags of some releases.
    short = {f"{kind}_parallel_size": f"{kind[0]}p_size" for kind in ("tensor", "pipeline", "data", "expert")}
    return {short.get(name, name): value for name, value in answer["parsed"].items()}


def ask(command: list[str], request: str = "") -> str:
    """Return what a program prints."""
    return subprocess.run(command, input=request, stdout=subprocess.PIPE, text=True, check=True).stdout


def configure_log(prefix: str) -> None:
    """Log in upstream's format."""
    logging.basicConfig(level=logging.INFO, format=f"[%(asctime)s{prefix}] %(message)s", datefmt="%Y-%m-%d %H:%M:%S", force=True)


def settings() -> dict[str, str]:
    """Return what SETTINGS says."""
    text = SETTINGS.read_text() if SETTINGS.exists() else ""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


class Engine:
    """The ranks, and what fusion does in them.

    Args:
        options: The server's options by destination.
    """

    def __init__(self, options: dict[str, object]) -> None:
        self.options, self.settings = options, settings()
        self.size: int = options["tp_size"]
        self.ranks: list[int] = []  # process ids
        self.stopping = False
        capabilities = ask(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).split()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.gpus = len(visible.split(",") if visible else capabilities)
        self.upstream = json.loads(ask([sys.executable, "-I", str(HERE / "upstream.py"), SITE, capabilities[0]]))
        asked = options.get("enable_flashinfer_allreduce_fusion") or options.get("flashinfer_allreduce_fusion_backend")
        self.fusion_asked = bool(asked) and self.size > 1
        self.fusion_active = False

    def start_ranks(self) -> None:
        """Start one process a GPU and wait until each has loaded its part of the model."""
        pipes = []
        for rank in range(self.size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                self.run_rank(rank, writer)
            os.close(writer)
            self.ranks.append(pid)
            pipes.append(reader)
        for rank, reader in enumerate(pipes):
            said = os.read(reader, 16)
            if not said:
                logger.error("Rank %d scheduler is dead. Please check if there are relevant logs.", rank)
                _pid, status = os.waitpid(self.ranks[rank], 0)
                self.die(f"Exit code: {os.waitstatus_to_exitcode(status)}")
            self.fusion_active = said == b"fused"

    def run_rank(self, rank: int, writer: int) -> None:
        """Be one rank: load, capture, tell the parent, and wait for the end."""
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(15, f"sim:TP{rank}".encode(), 0, 0, 0)  # PR_SET_NAME
        configure_log(f" TP{rank}")
        try:
            os.write(writer, b"fused" if self.load(rank) else b"ready")
        except Exception:
            logger.exception("Scheduler hit an exception:")
            os.kill(os.getppid(), signal.SIGQUIT)
            os._exit(1)
        while True:
            signal.pause()

    def load(self, rank: int) -> bool:
        """Load the model and capture the graphs; return whether fusion is active. Raises what upstream raises."""
        if rank >= self.gpus:
            raise RuntimeError("CUDA error: invalid device ordinal")
        logger.info("Load weight begin. avail mem=94.50 GB")
        time.sleep(float(self.settings.get("LOAD_SECONDS", "1")))
        logger.info("Load weight end. type=Simulated, dtype=torch.bfloat16, avail mem=30.10 GB, mem usage=64.40 GB.")
        if (self.options.get("mem_fraction_static") or 0) > HIGHEST_MEMORY_FRACTION:
            raise RuntimeError("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. (simulated)")
        active = self.fusion_asked and self.fuse(rank)
        if rank == 0:
            logger.info("Capture cuda graph end. Time elapsed: 0.00 s. mem usage=1.20 GB. avail mem=28.90 GB.")
        return active

    def fuse(self, rank: int) -> bool:
        """Go upstream's way to the fused kernels, as far as the installed gates let this rank."""
        upstream = self.upstream
        if upstream["backend"] not in (None, "absent"):
            raise as_raised(upstream["backend"])
        if upstream["workspace"] not in (None, "absent"):
            reason = upstream["workspace"].partition(": ")[2]
            logger.warning("FlashInfer workspace preflight probe failed (%s). Skipping allreduce fusion.", reason)
            return False
        if not upstream["applies"]:
            return False
        if upstream["module"]:
            error = as_raised(upstream["module"])
            raise RuntimeError(f"Capture cuda graph failed: {error}") from error
        self.compile(rank)
        logger.info(upstream["enabled"].format(rank=rank, world_size=self.size))
        return True

    def compile(self, rank: int) -> None:
        """Compile the JIT module where the cache lacks it: rank 0 does, the others wait as they would for the lock."""
        library = Path(self.upstream["library"])
        if rank == 0 and not library.exists():
            subprocess.run([str(HERE / "cicc"), self.settings.get("COMPILE_SECONDS", "1")], check=True)
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_text("simulated\n")
        while not library.exists():
            time.sleep(0.1)

    def watch_ranks(self) -> None:
        """Wait for a rank to end, which is the end of all."""
        pid, status = os.wait()
        if not self.stopping:
            self.die(f"Rank {self.ranks.index(pid)} scheduler is dead. Exit code: {os.waitstatus_to_exitcode(status)}")

    def die(self, reason: str) -> None:
        """End as upstream does when a rank has failed: kill all, this process included."""
        logger.error(reason)
        self.stopping = True
        for pid in self.ranks:
            os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        """End because systemd asks."""
        self.stopping = True
        for pid in self.ranks:
            os.kill(pid, signal.SIGTERM)
        os._exit(0)

    def hangs(self) -> bool:
        """Whether requests are never answered."""
        hang = settings().get("HANG", "never")
        return hang == "always" or (hang == "fusion" and self.fusion_active)


def as_raised(text: str) -> Exception:
    """Return the exception that was printed as ``text``."""
    kind, _colon, message = text.partition(": ")
    return {"RuntimeError": RuntimeError, "ValueError": ValueError}[kind](message)


class Server(ThreadingHTTPServer):
    """The HTTP server: the routes that the installed release has, of those that are simulated."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], engine: Engine) -> None:
        self.engine = engine
        self.routes = set(ROUTE.findall(Path(SITE, "sglang/srt/entrypoints/http_server.py").read_text()))
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

    def answer(self, body: dict[str, object]) -> None:
        """Send the answer to a request with this body."""
        options = self.server.engine.options
        key = options.get("api_key")
        if key and not self.path.startswith("/health") and self.headers.get("Authorization") != f"Bearer {key}":
            self.send(401, {"error": "Unauthorized"})
        elif self.path not in self.server.routes or self.path not in ANSWERS:
            self.send(404, {"detail": "Not Found"})
        elif self.path in HEALTH and self.server.engine.hangs():
            # Upstream generates here, too, unless it is told not to.
            if os.environ.get("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "true") == "true" or self.path == "/health_generate":
                patience = int(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", "20"))
                time.sleep(patience)
                logger.error("Health check failed. Server couldn't get a response from detokenizer for last %d seconds.", patience)
                self.send(503, "")
            else:
                self.send(200, "")
        elif self.path in GENERATING and self.server.engine.hangs():
            time.sleep(3600)
        else:
            self.send(200, ANSWERS[self.path](options, body))

    def send(self, status: int, body: object) -> None:
        """Send a status and an object as JSON."""
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, form: str, *args: object) -> None:
        logger.info('%s - "%s" %s', self.client_address[0], args[0], args[1])


def echo(prompt: str) -> str:
    """Return the made-up answer to a prompt: the number in it."""
    return f" {(re.findall('[0-9]+', prompt) or ['simulated'])[-1]}"


def server_info(options: dict[str, object], _body: dict[str, object]) -> object:
    """Answer what the server is."""
    return {**options, "version": importlib.metadata.version("sglang"), "simulated": True}


def generate(_options: dict[str, object], body: dict[str, object]) -> object:
    """Answer sglang's own request."""
    meta = {"id": "simulated", "finish_reason": {"type": "stop"}, "prompt_tokens": 8, "completion_tokens": 4, "cached_tokens": 0}
    return {"text": echo(str(body.get("text"))), "meta_info": meta}


def chat(options: dict[str, object], body: dict[str, object]) -> object:
    """Answer an OpenAI chat request."""
    message = {"role": "assistant", "content": echo(str(body["messages"][-1]["content"]))}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
    return {"id": "simulated", "object": "chat.completion", "model": options["model_path"], "choices": choices, "usage": usage}


def models(options: dict[str, object], _body: dict[str, object]) -> object:
    """Answer which models are served."""
    return {"object": "list", "data": [{"id": options["model_path"], "object": "model", "owned_by": "simulated"}]}


ANSWERS = {
    "/generate": generate,
    "/get_server_info": server_info,
    "/health": lambda _options, _body: "",
    "/health_generate": lambda _options, _body: "",
    "/server_info": server_info,
    "/v1/chat/completions": chat,
    "/v1/models": models,
}
HEALTH = ("/health", "/health_generate")
GENERATING = ("/generate", "/v1/chat/completions")


if __name__ == "__main__":
    main(sys.argv[1:])
