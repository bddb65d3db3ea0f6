"""GuideLLM: loads of chats, completions and Responses, whose every request succeeds."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from steps import CHAT, package, step

package("guidellm")


def load(path: str) -> None:
    """Run a load at two requests at a time; see that none failed, and that the server counted their tokens."""
    lines = (f"{number}. The capital of France is" for number in range(6))  # a question may end a completion at once
    backend = {"kind": "openai_http", "target": CHAT, "request_format": path, "max_tokens": 16}
    with TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
        report = Path(folder) / "report.json"
        options = {
            "--backend": json.dumps({**backend, "extras": {"body": {"temperature": 0}}}),
            "--profile": "kind=concurrent,streams=2",
            "--constraint": "kind=max_requests,count=6",
            "--data": f"kind=json_file,path={prompts}",
            "--output": f"kind=json,path={report}",
        }
        words = [word for option in options.items() for word in option]
        command = [sys.executable, "-m", "guidellm", "run", *words, "--disable-console"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180)
        assert report.exists(), (done.stdout + done.stderr)[-2000:]
        (found,) = json.loads(report.read_text())["benchmarks"]
    assert not found["requests"]["errored"], found["requests"]["errored"][0]["info"]["error"]
    assert found["metrics"]["request_totals"]["successful"] == 6
    assert all(1 < request["output_metrics"]["text_tokens"] <= 16 for request in found["requests"]["successful"])


@step
def chats() -> None:
    load("/v1/chat/completions")


@step
def completions() -> None:
    load("/v1/completions")


@step
def responses() -> None:
    load("/v1/responses")
