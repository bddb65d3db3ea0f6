"""lm_eval: log-probabilities and answers by completions, answers by chats."""

import os
import shlex
import subprocess
import sys
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager
from steps import CHAT_V1, TOOLS, TOOLS_V1, documented, package, step

package("lm_eval")

tasks = TaskManager(include_path="benchmarks/lm_eval")
COMPLETIONS = f"model=tools,base_url={TOOLS_V1}/completions,max_length=2048,num_concurrent=2"
TOKENIZER = f"tokenizer_backend=huggingface,tokenizer={os.environ['FORERUN_TOOLS_FOLDER']}"


def evaluate(model: str, arguments: str, task: str, **more: Any) -> dict[str, float]:
    """Return a task's measures."""
    found = lm_eval.simple_evaluate(model, arguments, tasks=[task], task_manager=tasks, bootstrap_iters=0, **more)
    return found["results"][task]


@step
def the_documented_command() -> None:
    words = shlex.split(documented("lm_eval --model", TOOLS).replace("\\\n", " "))[1:]
    given = [{"arc_easy": "lines_choice"}.get(word, word.replace("smollm2", "tools")) for word in words]
    command = [sys.executable, "-m", "lm_eval", *given, "--include_path", "benchmarks/lm_eval"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "lines_choice" in done.stdout, (done.stdout + done.stderr)[-2000:]


@step
def multiple_choice() -> None:
    assert 0 <= evaluate("local-completions", f"{COMPLETIONS},{TOKENIZER}", "lines_choice")["acc,none"] <= 1


@step
def rolling_log_probability() -> None:
    assert evaluate("local-completions", f"{COMPLETIONS},{TOKENIZER}", "lines_rolling")["byte_perplexity,none"] > 1


@step
def the_servers_own_tokenizer() -> None:
    remote = f"{COMPLETIONS},tokenizer_backend=remote"
    assert 0 <= evaluate("local-completions", remote, "lines_choice", limit=4)["acc,none"] <= 1


@step
def generation() -> None:
    texts = f"{COMPLETIONS},tokenizer_backend=None,tokenized_requests=False"
    assert "exact_match,none" in evaluate("local-completions", texts, "lines_generate")


@step
def chats() -> None:
    arguments = f"model=smollm2,base_url={CHAT_V1}/chat/completions,num_concurrent=2"
    found = evaluate("local-chat-completions", arguments, "lines_generate", apply_chat_template=True, limit=4)
    assert "exact_match,none" in found
