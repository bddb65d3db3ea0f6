"""HumanEval-Infilling (https://github.com/openai/human-eval-infilling, MIT): what a model writes between two texts.

    PYTHONPATH=src:tests python tests/human_eval_infilling.py HumanEval-SingleLineInfilling.jsonl.gz MODEL --count 100

Completes a line in the first tasks greedily, with and without a drafter, and prints how many texts are equal, and how
many pass their task's tests. What the model writes runs in a child process with limits of time, memory and processes,
in an empty folder, which may open no socket and no file for writing.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from forerun import LLM, Generation

SECONDS, MEMORY = 5, 1 << 30
GUARD = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE):
    resource.setrlimit(kind, (0, 0))
def guard(event, given):
    writes = event == "open" and isinstance(given[1], str) and set(given[1]) & set("wax+")
    if writes or event.split(".")[0] in ("socket", "subprocess", "os", "shutil", "ctypes", "signal"):
        if event not in ("os.listdir", "os.scandir"):  # which imports need
            raise PermissionError(event)
text = sys.stdin.read()
sys.addaudithook(guard)
exec(compile(text, "task", "exec"), {{}})
"""


def passes(task: dict[str, Any], middle: str) -> bool:
    """Return whether a task's tests pass with this text in the gap."""
    program = f"{task['prompt']}{middle}{task['suffix']}\n{task['test']}\ncheck({task['entry_point']})\n"
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-S", "-c", GUARD]
        try:
            done = subprocess.run(
                command, input=program.encode(), cwd=folder, env={}, capture_output=True, timeout=2 * SECONDS
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def completed(llm: LLM, tasks: list[dict[str, Any]], **options: Any) -> list[Generation]:
    """Return the answer to each task."""
    return [llm.infill(task["prompt"], task["suffix"], temperature=0.0, **options) for task in tasks]


def main() -> None:
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--whole", action="store_true", help="until the model ends, not to the end of a line")
    given = parser.parse_args()
    tasks = list(map(json.loads, gzip.decompress(given.data.read_bytes()).splitlines()))[: given.count]
    llm = LLM(given.model, drafter=given.drafter)
    options: dict[str, Any] = {} if given.whole else {"stop": "\n", "include_stop_str_in_output": True}
    options["max_tokens"] = given.max_tokens
    drafted = completed(llm, tasks, **options)
    plain = completed(llm, tasks, drafter="none", **options)
    same = sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True))
    with ThreadPoolExecutor(2) as pool:
        passed = sum(pool.map(passes, tasks, [answer.text for answer in plain]))
        own = sum(pool.map(passes, tasks, [task["canonical_solution"] for task in tasks]))
    forwards = sum(answer.stats.num_forwards for answer in drafted)
    tokens = sum(len(answer.token_ids) for answer in drafted)
    print(f"{len(tasks)} tasks: {same} drafted texts are the plain ones; {passed} pass ({own} by their own solutions)")
    print(f"{tokens} tokens in {forwards} forwards with {given.drafter}: {tokens / max(forwards, 1):.2f} a forward")


if __name__ == "__main__":
    main()
