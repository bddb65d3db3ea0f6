"""The code blocks of README and docs run on the bundled model: `make blocks`, ARGS='-k serving' for those of a page.

A line is run as it stands, but for what STANDS_FOR and SHORTER say; what does not run here is in NOT_RUN, with the
reason. tests/unit/test_docs.py runs the blocks of README and docs/python.md that are Python.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from forerun.export.transformers import export_hf

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LIMIT = 1200.0
"""Seconds of a line."""

NOT_RUN = {
    r"pip install|venv ov|optimum-cli": "installs other programs",
    r"^make |docker ": "is a program of its own",
    r"forerun fetch|Qwen/": "needs a network",
    r"vllm serve|llama-|llama\.cpp|bench peers": "needs other engines (make scale)",
    r"--ray": "needs Ray (make scale)",
    r"triton|in-memory|TRITON": "needs a GPU or Triton (make gpu)",
    r"pytest|CXX=|FORERUN_HOME=|FORERUN_KERNELS=|FORERUN_VLLM|LD_PRELOAD=": "is a test of its own",
    r"http://(a|with)\b": "needs servers elsewhere",
    r"model\.gguf": "needs a GGUF file",
    r"coder:1\.5b": "needs Ollama's store",
    r"lm_eval ": "needs lm_eval (make clients)",
}
"""What a line of the shell has -> why it does not run here."""
STANDS_FOR = {
    r"\.venv/bin/forerun": "forerun",
    r"chat --model MODEL": "chat --model ./chat",
    r"(?<![\w/])smollm2(?![\w-])|path/to/model": "./chat",
    r"forerun chat(?= --| *#| *$)(?!.*--model)": "forerun chat ./chat",
    r"forerun generate (?=--system)": "forerun generate --model ./chat ",
    r"owner/draft": "bundled-draft",
    r"owner/model|(?<==)MODEL|\bMODEL\b": "bundled",
    r"\bHEAD\b": str(ROOT / "src/forerun/assets/heads/eagle/bundled"),
    r"\bFILE\b|mine\.jsonl": "prompts.jsonl",
    r"new\.json": "old.json",
    r"--layers 8": "--layers 1",
    r"SIBLING": "bundled-draft",
}
"""What stands for something of the reader's -> what is here."""
SHORTER = {
    "bench generate": "--num-prompts 1 --max-tokens 8 --rounds 1 --no-details",
    "bench replay": "--num-prompts 1 --max-tokens 8",
    "bench quality": "--num-prompts 1",
    "bench serve": "--concurrency 1 --num-prompts 2 --requests 2 --rounds 1 --max-tokens 4",
    "audit ./chat": "--quick",
    "audit --url": "--quick",
    "tune": "--minutes 0.2",
    "export vllm": "--force",
    "train answers": "--answers 12 --max-tokens 48 --force",
    "train (eagle|block|medusa|mtp|draft)": "--minutes 0.05 || test $? = 1",  # so little data may make no head
}
"""The beginning of a command -> flags with which it takes less time, or writes over what a line before has written."""
PREPARED = {
    "person.json": '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}',
    "prompts.jsonl": "".join(json.dumps({"prompt": f"def f{number}(x):\n"}) + "\n" for number in range(4)),
    "articles/one.txt": "A stack is a list. " * 80,
    "src/one.py": "def f(x):\n    return x\n\n\n" * 40,
}
"""Files that pages speak of."""
OF_TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = (made.from_pretrained("chat") for made in (AutoTokenizer, AutoModelForCausalLM))
inputs = tokenizer("def f(x):", return_tensors="pt")
"""


class Shell:
    """Runs the blocks of one page in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: subprocess.Popen[str] | None = None
        self.errors: list[str] = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        program = folder / "bin" / "forerun"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m forerun "$@"\n')
        program.chmod(0o755)
        path = f"{program.parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "KEY": "a-key"}

    def block(self, language: str, text: str) -> None:
        """Run a block."""
        self.stop()
        text = text.replace("localhost:8000", f"127.0.0.1:{self.port}")
        if language == "sh":
            for line in re.sub(r"\\\n\s*", " ", text).splitlines():
                self.line(line)
        elif language == "python" and "..." not in text:
            self.need_server(text)
            self.run([sys.executable, "-c", (OF_TRANSFORMERS if "custom_generate" in text else "") + text])
        elif language == "toml" and text.startswith("# forerun --config"):
            name = text.split()[3]
            (self.folder / name).write_text(re.sub(r"\bsmollm2\b", "./chat", text))
            self.run(["bash", "-c", f"forerun --config {name} drafters"])
        elif language == "toml":
            tomllib.loads(text)
        elif language == "json":
            lines = [json.loads(line) for line in text.splitlines()]
            (self.folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            print(
                f"   not run, {'an excerpt' if language == 'python' else 'tests/unit/server/test_deployment.py does'}"
            )

    def line(self, line: str) -> None:
        """Run a line of a shell."""
        if why := next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), None):
            print(f"   not run, {why}: {line}")
            return
        for pattern, here in STANDS_FOR.items():
            line = re.sub(pattern, here, line)
        line = re.sub(r"\s+#.*$", "", line)
        for beginning, flags in SHORTER.items():
            line = re.sub(rf"(forerun {beginning}.*)$", rf"\1 {flags}", line)
        if line.startswith("forerun serve"):
            self.serve(line)
        elif line.strip():
            self.need_server(line)
            self.run(["bash", "-c", line])

    def need_server(self, text: str) -> None:
        """Start a server where a line asks one, and none runs."""
        if f"127.0.0.1:{self.port}" in text and self.server is None:
            self.serve("forerun serve ./chat --served-model-name smollm2")

    def serve(self, line: str) -> None:
        """Start a server and wait for it."""
        self.stop()
        command = f"exec {line} --port {self.port} --log-format json"
        self.server = subprocess.Popen(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, stderr=subprocess.PIPE, text=True
        )
        assert self.server.stderr is not None
        told = []
        for each in self.server.stderr:
            told.append(each)
            if '"event": "ready"' in each:
                print(f"   ok: {line}")
                return
        self.errors.append(f"{line}: {''.join(told)[-800:]}")

    def stop(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.terminate()
            self.server.communicate(timeout=LIMIT)
            self.server = None

    def run(self, command: list[str]) -> None:
        """Run a program; keep what it says if it fails."""
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT,
        )  # fmt: skip
        said = "ok" if done.returncode == 0 else "FAILED"
        print(f"   {said}, {time.monotonic() - started:.0f} s: {command[-1].strip()}", flush=True)
        if done.returncode:
            self.errors.append(f"{command[-1]}: exit code {done.returncode}: {(done.stdout + done.stderr)[-800:]}")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a chat template, for pages that speak of a chat model."""
    folder = tmp_path_factory.mktemp("model") / "chat"
    export_hf("bundled", folder)
    template = "{% for message in messages %}# {{ message.content }}\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def shell(tmp_path: Path, chat: Path) -> Iterator[Shell]:
    for name, content in PREPARED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "chat").symlink_to(chat)
    made = Shell(tmp_path)
    yield made
    made.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, shell: Shell) -> None:
    run_elsewhere = page.stem in ("README", "python")
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    for language, text in sorted(blocks, key=lambda each: each[0] not in ("json", "toml")):  # files come first
        needed = set(re.findall(r"^from (\w+) import", text, re.MULTILINE)) if language == "python" else set()
        missing = [name for name in sorted(needed) if find_spec(name) is None]
        if missing or (run_elsewhere and language == "python"):
            print(f"   not run, {'needs ' + missing[0] if missing else 'tests/unit/test_docs.py does'}: Python")
        else:
            shell.block(language, text)
    assert shell.errors == []


def test_each_reason_not_to_run_a_line_is_needed() -> None:
    lines = [line for page in PAGES for line in page.read_text(encoding="utf-8").splitlines()]
    assert [each for each in NOT_RUN if not any(re.search(each, line) for line in lines)] == []
