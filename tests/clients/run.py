"""Run published clients against forerun's server: `make clients`, or `python tests/clients/run.py [NAME ...]`.

What the clients need lies in build/clients: environments, one for each requirements-ENVIRONMENT.txt, since their needs
contradict each other, and a random model. TORCH is what pip installs as torch in the one that needs it. The table that
is printed is that of docs/serving.md. Returns 1 if a client cannot do what it should, or can do what it should not.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUILD = Path("build/clients")
TOOLS_FOLDER = BUILD / "tools"
TOOLS_OPTIONS = ("--served-model-name", "tools", "--dtype", "float32")
SCRIPTS = {
    "openai3": [
        "use_openai",
        "use_openai_responses",
        "turns_openai",
        "use_anthropic",
        "turns_anthropic",
        "use_litellm",
        "use_langchain",
        "use_pydantic_ai",
        "use_openai_agents",
        "use_smolagents",
        "use_llm",
        "use_ollama",
    ],
    "openai2": ["use_llama_index", "use_instructor"],
    "aider": ["use_aider"],
    "measures": ["use_lm_eval", "use_guidellm"],
}
"""Environment -> its scripts."""
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1"}
"""Keeps clients from sending anything to other hosts."""
LIMIT = 600.0
"""Seconds of a script."""


def environment(name: str) -> Path:
    """Return the Python of an environment, which is made if its requirements are new."""
    folder, requirements = BUILD / name, HERE / f"requirements-{name}.txt"
    python, stamp = folder / "bin/python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        print(f"installing {requirements.name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if name == "measures":
            subprocess.run([*install, *shlex.split(os.environ.get("TORCH", "torch==2.13.0"))], check=True)
        subprocess.run([*install, "--requirement", requirements], check=True)
        stamp.write_text(requirements.read_text())
    return python


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Yield the address of a server, which ends with the block."""
    command = [sys.executable, "-m", "forerun", "serve", *arguments, "--port", "0", "--log-format", "json"]
    log = BUILD / f"{Path(arguments[0]).name}.log"
    with log.open("w") as written, log.open() as lines, subprocess.Popen(command, stderr=written) as process:
        try:
            while process.poll() is None:
                time.sleep(0.02)
                line = lines.readline()
                if '"event": "ready"' in line:
                    yield json.loads(line)["url"]
                    return
            raise RuntimeError(f"the server ended; see {log}")
        finally:
            process.terminate()


def report(python: Path, script: str) -> list[dict[str, Any]]:
    """Run a script and return what it reports: its client, then its steps."""
    command = [python, HERE / f"{script}.py"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"client": ', '{"step": '))]
    if done.returncode:
        found.append({"step": script, "error": f"exit code {done.returncode}", "cannot": None})
    for each in found[1:]:
        print(f"{script}: {each['step']}: {each['error'] or 'ok'}", file=sys.stderr)
    return found


def main(chosen: list[str]) -> int:
    """Run the scripts whose names hold any of these words, or all, and print the table."""
    BUILD.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "tools_model.py", TOOLS_FOLDER], check=True)
    subprocess.run([sys.executable, "-m", "forerun", "fetch", "smollm2"], check=True, stdout=sys.stderr)
    rows: dict[str, list[dict[str, Any]]] = {}
    with server("smollm2") as chat, server(str(TOOLS_FOLDER), *TOOLS_OPTIONS) as tools:
        os.environ |= QUIET | {"FORERUN_CHAT": chat, "FORERUN_TOOLS": tools, "FORERUN_TOOLS_FOLDER": str(TOOLS_FOLDER)}
        for name, scripts in SCRIPTS.items():
            for script in scripts:
                if not chosen or any(word in script for word in chosen):
                    client, *steps = report(environment(name), script)
                    rows.setdefault(f"{client['client']} | {client['version']}", []).extend(steps)
    print("| client | version | works | cannot |\n|---|---|---|---|")
    for row, steps in rows.items():
        works = ", ".join(each["step"] for each in steps if not each["error"])
        cannot = "; ".join(f"{each['step']}: {each['cannot'] or 'FAILED'}" for each in steps if each["error"])
        print(f"| {row} | {works} | {cannot} |")
    return int(any(bool(each["error"]) != bool(each["cannot"]) for steps in rows.values() for each in steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
