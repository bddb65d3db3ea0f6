"""Servers of a model that writes one text, in the format of a family."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager
from typing import Any

import httpx
import torch

from doubles import FakeModel, adversaries
from family_answers import CASES, Case
from forerun import LLM
from serving import LIMIT, serving
from small_tokenizers import END, byte_level, ids_of

SPECIAL = {
    "harmony": ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]"],
}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}


class Writer(FakeModel):
    """Writes one text, wherever it is not held to another."""

    def __init__(self, script: Seq[int], vocab_size: int, end: int) -> None:
        super().__init__(vocab_size, order=len(script), num_contexts=len(script), eos_token_ids=[end])
        self.script = [*script]
        self.table[torch.arange(len(script)), torch.tensor(script)] = 60.0

    def slot(self, path: Seq[int]) -> int:
        lengths = range(min(len(path), len(self.script) - 1), 0, -1)
        return next((size for size in lengths if [*path[-size:]] == self.script[:size]), 0)


def tokenizer_of(name: str, case: Case) -> Any:
    made = byte_level()
    made.add_special_tokens({"additional_special_tokens": SPECIAL.get(name, [])})
    calls = "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    said = f"{{% for message in messages %}}{{{{ message.content }}}}{calls}{{% endfor %}}"
    said += "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    made.chat_template = f"{{# {case.written} #}}{said}{{{{ {json.dumps(case.prompt)} }}}}"
    return made


@contextmanager
def written(name: str, text: str | None = None, **options: Any) -> Iterator[httpx.Client]:
    """A client of a server whose model writes the answer of a family."""
    case = CASES[name]
    tokenizer = tokenizer_of(name, case)
    ids = tokenizer(text or case.text, add_special_tokens=False)["input_ids"]
    end = ids_of(tokenizer, END)
    model: Any = Writer([*ids, *end], len(tokenizer), end[0])
    llm = LLM(model, adversaries({}, len(tokenizer))["random"], tokenizer=tokenizer, num_draft_tokens=3)
    with serving(llm, **options) as served, httpx.Client(base_url=served.url, timeout=LIMIT) as client:
        yield client


def answered(client: httpx.Client, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    response = client.post(path, json={**TALK, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def called(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
