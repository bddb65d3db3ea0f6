"""llama.cpp as a peer: one llama-server per method, which reports its own timings. The protocol is that of `worker`.

The servers listen on sockets in a temporary folder that is gone with the worker; they are reached by no network.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from forerun.lab.bench.peers.run import SERVER
from forerun.lab.bench.peers.worker import DRAFT, LOOKUP, PLAIN, answer_requests

_POLL_SECONDS = 0.1
_UNIX: socket.AddressFamily | None = getattr(socket, "AF_UNIX", None)


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = str(path)

    def connect(self) -> None:
        assert _UNIX is not None
        self.sock = socket.socket(_UNIX, socket.SOCK_STREAM)
        self.sock.connect(self._path)


class LlamaServer:
    """One llama-server, until `close`. Raises RuntimeError where it ends while it loads."""

    def __init__(self, command: list[str], folder: Path, name: str) -> None:
        if _UNIX is None:
            raise RuntimeError(f"{SERVER} is asked over a Unix socket, which Python does not have on Windows")
        self._path = folder / f"{name}.sock"
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "--host", str(self._path)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        while not self._healthy():
            if (code := self._process.poll()) is not None:
                how = f"with exit code {code}" if code >= 0 else f"by signal {-code}"
                raise RuntimeError(f"{SERVER} ended {how}; the last that it printed: {self._last_line()}")
            time.sleep(_POLL_SECONDS)

    @property
    def log(self) -> str:
        """Return what the server has printed."""
        return self._log.read_text(errors="replace")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. Raises RuntimeError where the server refuses it."""
        return self._exchange("POST", path, json.dumps(body).encode())

    def get(self, path: str) -> dict[str, Any]:
        """Send a query and return the reply."""
        return self._exchange("GET", path, None)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _exchange(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        with contextlib.closing(_Connection(self._path)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}")
        reply: dict[str, Any] = json.loads(content)
        return reply

    def _healthy(self) -> bool:
        try:
            self.get("/health")
        except (OSError, RuntimeError, http.client.HTTPException):
            return False
        return True

    def _last_line(self) -> str:
        lines = [line for line in self.log.splitlines() if line.strip()]
        return lines[-1] if lines else "it printed nothing"


class LlamaCpp:
    """llama.cpp by plain decoding, by its lookup of n-grams, and with a draft model, each in a server of its own."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._stack = contextlib.ExitStack()
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="forerun-")))
            self._servers = self._started(options, folder)
            about = self._servers[PLAIN].get("/props")
            self.ready = {
                "version": f"llama.cpp {about.get('build_info', 'of unknown version')}",
                "instructions": instructions(self._startup_log),
                "precision": str(about.get("model_ftype", "unknown")).removeprefix("all "),
                "methods": list(self._servers),
            }
        except BaseException:
            self._stack.close()
            raise

    def _started(self, options: dict[str, Any], folder: Path) -> dict[str, LlamaServer]:
        threads = str(options["threads"])
        command = [str(Path(options["program"]) / SERVER), "--model", options["model"], "--offline"]
        command += ["--threads", threads, "--threads-batch", threads, "--parallel", "1", "--no-cache-prompt"]
        talkative = LlamaServer([*command, "--verbosity", "4"], folder, "first")  # else it does not print what it uses
        self._startup_log = talkative.log
        talkative.close()
        more: dict[str, list[str]] = {PLAIN: []}
        if options["lookup"]:
            more[LOOKUP] = lookup_arguments(options["lookup"])
        if options["draft"]:
            more[DRAFT] = ["--model-draft", options["draft"], "--spec-type", "draft-simple"]
        servers = {}
        for number, (method, arguments) in enumerate(more.items()):
            servers[method] = LlamaServer(command + arguments, folder, str(number))
            self._stack.callback(servers[method].close)
        return servers

    def generate(self, method: str, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        reply = self._servers[method].post(
            "/completion",
            {
                "prompt": token_ids,
                "n_predict": max_tokens,
                "samplers": ["top_k"],
                "top_k": 1,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        timings = reply["timings"]
        accepted = timings.get("draft_n_accepted", 0)
        return {
            "token_ids": reply["tokens"],
            "seconds": (timings["prompt_ms"] + timings["predicted_ms"]) / 1000,
            "first_seconds": timings["prompt_ms"] / 1000,
            "steps": timings["predicted_n"] - accepted,
        }

    def close(self) -> None:
        self._stack.close()


def lookup_arguments(lookup: str) -> list[str]:
    """Return the arguments of a type of lookup: TYPE, or TYPE/N/M, with the lengths of key and draft."""
    kind, *sizes = lookup.split("/")
    lengths = [
        part for letter, size in zip("nm", sizes, strict=False) for part in (f"--spec-{kind}-size-{letter}", size)
    ]
    return ["--spec-type", kind, *lengths]


def instructions(log: str) -> str:
    """Parse the instruction sets of the line "system_info: ... | CPU : SSE3 = 1 | AVX = 1 | ... |"."""
    found = re.search(r"system_info:.*", log)
    names = re.findall(r"(\w+) = 1\b", found.group().partition("|")[2]) if found else []
    return " ".join(names) or "unknown"


if __name__ == "__main__":
    answer_requests(LlamaCpp)
