"""The program `llm` at an endpoint that its command line names: prompts, streams, schemas, tools, Responses."""

import json
import subprocess
import sys

from steps import CHAT_V1, QUESTION, TOOLS_V1, package, step

package("llm")

SHORT = ["-o", "temperature", "0", "-o", "max_tokens", "24"]
FUNCTION = """
def weather(city: str) -> str:
    "Tell the weather of a city."
    return "sunny in " + city
"""


def run(url: str, model: str, *arguments: str) -> str:
    """Return what the program prints. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "llm", "openai", "endpoint", url, "-m", model, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return done.stdout


@step
def prompt() -> None:
    assert "Paris" in run(CHAT_V1, "smollm2", QUESTION, "--no-stream", *SHORT)


@step
def stream() -> None:
    assert "Paris" in run(CHAT_V1, "smollm2", QUESTION, "-s", "You answer in a sentence.", *SHORT)


@step
def models() -> None:
    command = [sys.executable, "-m", "llm", "openai", "endpoint", CHAT_V1, "--models"]
    assert "smollm2" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@step
def schema() -> None:
    assert "days" in json.loads(run(TOOLS_V1, "tools", "How is the weather?", "--schema", "days int"))


@step
def tools_offered() -> None:
    assert run(TOOLS_V1, "tools", "How is the weather?", "--functions", FUNCTION, *SHORT)


@step
def responses() -> None:
    assert "Paris" in run(CHAT_V1, "smollm2", QUESTION, "--responses", *SHORT)
