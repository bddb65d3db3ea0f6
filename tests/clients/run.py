"""Run published clients against forerun's server: `make clients`, or `python tests/clients/run.py [NAME ...]`.

What the clients need lies in build/clients: environments, one for each requirements-ENVIRONMENT.txt, since their needs
contradict each other, the programs of package.json, if npm can install them, and a random model. TORCH is what pip
installs as torch in the one that needs it. The table that is printed is that of docs/serving.md. Returns 1
if a client cannot do what it should, or can do what it should not.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
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
        "use_llama_vim",
    ],
    "openai2": ["use_llama_index", "use_instructor"],
    "aider": ["use_aider"],
    "measures": ["use_lm_eval", "use_guidellm"],
    "agents": ["use_agents"],
}
"""Environment -> its scripts."""
QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HF_HUB_OFFLINE": "1"}
"""Keeps clients from sending anything to other hosts."""
LIMIT = 600.0
"""Seconds of a script."""


def environment(name: str) -> Path:
    """Return the Python of an environment, which is made if its requirements are new. Raises OSError and
    CalledProcessError if it cannot be."""
    programs = name == "agents"
    folder, requirements = BUILD / name, HERE / ("package.json" if programs else f"requirements-{name}.txt")
    python, stamp = Path(sys.executable) if programs else folder / "bin/python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != requirements.read_text():
        print(f"installing {requirements.name}", file=sys.stderr)
        if programs:
            folder.mkdir(exist_ok=True)
            shutil.copy(requirements, folder)
            subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)
            stamp.write_text(requirements.read_text())
            return python
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if name == "measures":
            subprocess.run([*install, *shlex.split(os.environ.get("TORCH", "torch==2.13.0"))], check=True)
        subprocess.run([*install, "--requirement", requirements], check=True)
        stamp.write_text(requirements.read_text())
    return python


@contextmanager
def server(name: str, *arguments: str, program: Sequence[str] = ("-m", "forerun", "serve")) -> Iterator[str]:
    """Yield the address of a server, which ends with the block. name: of its log."""
    command = [sys.executable, *program, *arguments, "--port", "0", "--log-format", "json"]
    log = BUILD / f"{name}.log"
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
    """Run a script and return what it reports: each of its clients, then its steps."""
    command = [python, HERE / f"{script}.py"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=LIMIT)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('{"client": ', '{"step": '))]
    if done.returncode:
        found.append({"step": script, "error": f"exit code {done.returncode}", "cannot": None})
    for each in found:
        if "step" in each:
            print(f"{script}: {each['step']}: {each['error'] or 'ok'}", file=sys.stderr)
    return found


def reports(name: str, scripts: list[str]) -> list[dict[str, Any]]:
    """Return what the scripts of an environment report; programs that cannot be installed are skipped."""
    try:
        python = environment(name) if scripts else Path()
    except (OSError, subprocess.CalledProcessError) as error:
        if name != "agents":
            raise
        clients = ", ".join(json.loads((HERE / "package.json").read_text())["dependencies"])
        reason = f"skipped, since npm cannot install it ({error})"
        return [{"client": clients, "version": "–"}, {"step": "an edit", "error": reason, "cannot": reason}]
    return [line for script in scripts for line in report(python, script)]


def main(chosen: list[str]) -> int:
    """Run the scripts whose names hold any of these words, or all, and print the table."""
    BUILD.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "tools_model.py", TOOLS_FOLDER], check=True)
    subprocess.run([sys.executable, "-m", "forerun", "fetch", "smollm2"], check=True, stdout=sys.stderr)
    rows: dict[str, list[dict[str, Any]]] = {}
    scripted = str(HERE / "scripted_server.py")
    with (
        server("chat", "smollm2") as chat,
        server("tools", str(TOOLS_FOLDER), *TOOLS_OPTIONS) as tools,
        server("scripted", str(TOOLS_FOLDER), "--served-model-name", "coder", program=[scripted]) as coder,
    ):
        addresses = {"FORERUN_CHAT": chat, "FORERUN_TOOLS": tools, "FORERUN_SCRIPTED": coder}
        os.environ |= QUIET | addresses | {"FORERUN_TOOLS_FOLDER": str(TOOLS_FOLDER)}
        for name, scripts in SCRIPTS.items():
            chosen_here = [each for each in scripts if not chosen or any(word in each for word in chosen)]
            for found in reports(name, chosen_here):
                if "client" in found:
                    steps = rows.setdefault(f"{found['client']} | {found['version']}", [])
                else:
                    steps.append(found)
    print("| client | version | works | cannot |\n|---|---|---|---|")
    for row, steps in rows.items():
        works = ", ".join(each["step"] for each in steps if not each["error"])
        cannot = "; ".join(f"{each['step']}: {each['cannot'] or 'FAILED'}" for each in steps if each["error"])
        print(f"| {row} | {works} | {cannot} |")
    return int(any(bool(each["error"]) != bool(each["cannot"]) for steps in rows.values() for each in steps))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
