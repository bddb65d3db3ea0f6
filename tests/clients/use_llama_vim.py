"""llama.vim: the requests of its source (autoload/llama.vim), as curl sends them; a line is completed."""

import json
import re
from typing import Any
from urllib.request import Request, urlopen

from steps import SCRIPTED, documented, package, step

package("llama.vim", "a1c8e6e4 (its source)")

CONFIG = dict(re.findall(r"'(\w+)': '([^']+)'", documented("g:llama_config", SCRIPTED)))
EXTRA = [{"text": "def add(a, b):\n    return a + b\n", "time": [12, 345678], "filename": "calc.py"}]
PREFIX, SUFFIX = "def twice(a):\n    return add(a, a)\n\n\n", "\n\n\nprint(total(1, 2))\n"
COMMON = {"id_slot": 0, "model": "", "stream": False, "cache_prompt": True}
TIMINGS = [
    f"{part}_{figure}" for part in ("prompt", "predicted") for figure in ("n", "ms", "per_token_ms", "per_second")
]
FIELDS = ["content", *(f"timings/{name}" for name in TIMINGS), "truncated", "tokens_cached"]


def post(endpoint: str, **fields: Any) -> bytes:
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(CONFIG[endpoint], json.dumps(fields).encode(), headers), timeout=60) as answer:
        body: bytes = answer.read()
    return body


@step
def the_ring_buffer_ahead() -> None:
    sampling = {"n_predict": 0, "temperature": 0.0, "samplers": [], "t_max_prompt_ms": 1, "t_max_predict_ms": 1}
    texts = {"input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": ""}
    post("endpoint_fim", **COMMON, **texts, **sampling, response_fields=[""])


@step
def a_line_completed() -> None:
    texts = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "input_extra": EXTRA, "prompt": "def total(a, b):\n    "}
    limits = {"n_predict": 128, "stop": [], "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
    sampling = {"top_k": 40, "top_p": 0.90, "samplers": ["top_k", "top_p", "infill"]}
    answer = json.loads(post("endpoint_fim", **COMMON, **texts, **limits, **sampling, response_fields=FIELDS))
    assert {*answer} == {"content", "truncated", "tokens_cached"} | {f"timings/{name}" for name in TIMINGS}, answer
    assert answer["content"] == "a + b" and answer["timings/predicted_n"] > 0


@step
def an_instruction() -> None:
    messages = [{"role": "system", "content": "You edit code."}, {"role": "user", "content": "Hi."}]
    ahead = {"samplers": [], "n_predict": 0, "response_fields": [""]}
    post("endpoint_inst", **COMMON, messages=messages, **ahead)
    sampling = {"min_p": 0.1, "temperature": 0.1, "samplers": ["min_p", "temperature"]}
    events = post("endpoint_inst", **{**COMMON, "stream": True}, messages=messages, **sampling).decode()
    pieces = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in pieces if each["choices"]) == "Hello."
