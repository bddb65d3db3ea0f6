"""Peers without models: scripts that stand where a user names an interpreter, a good one and bad ones."""

from __future__ import annotations

import sys
from pathlib import Path

GOOD = """
    class Engine:
        def __init__(self, options):
            self.ready = {{"version": "fake 1", "instructions": "{instructions}", "precision": "{precision}",
                          "methods": ["plain", "prompt lookup"], "eos_token_ids": [9], "context_length": 4096}}
        def generate(self, method, token_ids, max_tokens):
            print("chatter on standard output")
            {body}
            drafted = method != "plain"
            tokens = [(token_ids[-1] + i) % 11 for i in range(max_tokens)]
            return {{"token_ids": tokens, "seconds": {seconds} / (2 if drafted else 1), "first_seconds": 0.1,
                    "steps": max_tokens // (2 if drafted else 1)}}
    worker.answer_requests(Engine)
"""
_START = """#!{python} -S
import json, os, pathlib, sys, time
sys.path.insert(0, {folder!r})
import worker
if True:
"""
WORKER = Path(__file__).parents[3] / "src" / "forerun" / "lab" / "bench" / "peers"

BODIES = {
    "good": "pass",
    "crashes at the second prompt": "os._exit(3) if token_ids[0] == 2 else None",
    "hangs at the second prompt": "time.sleep(600) if token_ids[0] == 2 else None",
    "stops early": "max_tokens -= 1",
    "fails in one method": "if method != 'plain': raise RuntimeError('a secret ' + str(token_ids))",
}
SCRIPTS = {
    "exits at start": "    sys.exit('no such library')\n",
    "prints garbage": "    sys.stdin.readline(); print('Welcome!'); sys.stdin.read()\n",
    "prints another object": "    sys.stdin.readline(); print('{{}}'); sys.stdin.read()\n",
    "prints no line": "    sys.stdin.readline(); os.write(1, b'x' * 100); os._exit(0)\n",
    "never gets ready": "    time.sleep(600)\n",
}


def fake_interpreter(
    folder: Path, kind: str = "good", *, precision: str = "bfloat16", seconds: float = 1.0, instructions: str = "AVX2"
) -> Path:
    """An executable that behaves as `kind`, a key of BODIES or of SCRIPTS, whatever it is asked to run."""
    path = folder / f"{kind.replace(' ', '-')}-{precision}-{seconds}"
    text = _START + (GOOD if kind in BODIES else SCRIPTS[kind])
    values = {"precision": precision, "seconds": seconds, "instructions": instructions, "body": BODIES.get(kind, "")}
    path.write_text(text.format(python=sys.executable, folder=str(WORKER), **values))
    path.chmod(0o755)
    return path


SERVER = """#!{python} -S
import json, os, socketserver, sys
from http.server import BaseHTTPRequestHandler

arguments = sys.argv[1:]
if "bad" in arguments[arguments.index("--model") + 1]:
    sys.exit("error loading model")
lookup = "--spec-type" in arguments

class Handler(BaseHTTPRequestHandler):
    def reply(self, status, value):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_GET(self):
        about = {{"build_info": "b1-fake", "model_ftype": "all F32", "status": "ok"}}
        self.reply(200, about)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == [13]:
            return self.reply(500, {{"error": "a secret"}})
        assert asked["ignore_eos"] and not asked["cache_prompt"] and asked["temperature"] == 0
        n = asked["n_predict"]
        timings = {{"prompt_ms": 100.0, "predicted_ms": 400.0, "predicted_n": n}}
        if lookup:
            timings["draft_n_accepted"] = n // 2
        self.reply(200, {{"tokens": [asked["prompt"][-1]] * n, "timings": timings}})
    def address_string(self):
        return ""

if "--verbosity" in arguments:
    print("I system_info: n_threads = 1 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 |", flush=True)
with socketserver.UnixStreamServer(arguments[arguments.index("--host") + 1], Handler) as server:
    server.serve_forever(0.05)
"""


def fake_llama_server(folder: Path) -> Path:
    """The folder of a llama-server that loads any model but those with "bad" in their names."""
    path = folder / "llama-server"
    path.write_text(SERVER.format(python=sys.executable))
    path.chmod(0o755)
    return folder
