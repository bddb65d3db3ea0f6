"""Requests of mixed kinds through HTTP, and what each must be answered: the text of its twin, computed offline."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from typing import Any

from forerun import LLM, Grammar, SamplingParams
from forerun.engine.chat_template import Prompt

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
OLLAMA = (GENERATE, OLLAMA_CHAT) = ("/api/generate", "/api/chat")
DRAFTERS = ("draft-model", "suffix", "recycling")
TEMPLATE = "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}# answer:\n"
PROMPTS = (
    "def quicksort(items):\n",
    "class Stack:\n    def push(self, item):\n",
    "import os\n\nfor name in ",
    "x = [1, 2",
    "# Größe und Länge\n",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\n" * 4,
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}

Answer = list[tuple[str, str | None]]
"""Of each choice: the text, and why it ended; None where nobody was told."""


@dataclass(frozen=True)
class Asked:
    """One request, and the same as a twin asks it."""

    url: str
    body: dict[str, Any]
    prompts: list[Prompt]
    params: SamplingParams

    def twin(self, plain: LLM) -> Answer:
        """What it must be answered."""
        answers = plain.generate(self.prompts, self.params)
        echoed = [str(prompt) if self.body.get("echo") else "" for prompt in self.prompts]
        return [
            (echo + choice.text, str(choice.finish_reason))
            for echo, answer in zip(echoed, answers)
            for choice in answer.choices
        ]


def load(**options: Any) -> LLM:
    """The bundled model with a chat template."""
    llm = LLM("bundled", **options)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def mixed(rng: random.Random, llm: LLM) -> Asked:
    """A request of any kind, greedy or with a seed."""
    made = rng.choice([_completion, _completion, _completion, _chat, _chat, _response, _ollama])(rng, llm)
    drafted = rng.choice([True, False, *DRAFTERS, "none", {"num_draft_tokens": 2}])
    streams = "logprobs" not in made.body and rng.random() < 0.5
    if made.url in OLLAMA:
        options = made.body["options"] | {"speculative": drafted}
        return replace(made, body=made.body | {"options": options, "stream": streams})
    return replace(made, body=made.body | {"speculative": drafted, "stream": streams})


def _sampling(rng: random.Random, *, has_stops: bool = True) -> dict[str, Any]:
    """Options that bodies and SamplingParams call by the same name."""
    made: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.7:
        made = {"seed": rng.randrange(1000), "temperature": rng.choice([0.6, 1.0]), "top_p": rng.choice([1.0, 0.9])}
    if rng.random() < 0.3:
        made |= {"repetition_penalty": 1.1, "top_k": 20}
    if rng.random() < 0.2:
        made |= {"frequency_penalty": 0.5, "min_p": 0.05}
    if has_stops and rng.random() < 0.3:
        made |= {"stop": ["\n\n", "self"]}
    if rng.random() < 0.2:
        made |= {"logit_bias": {"17": -5}, "min_tokens": 1}
    return made


def _completion(rng: random.Random, llm: LLM) -> Asked:
    made, length = _sampling(rng), rng.randrange(1, 40)
    body: dict[str, Any] = {}
    prompts: list[Prompt] = [rng.choice(PROMPTS)]
    kind = rng.random()
    if kind < 0.15:
        prompts = rng.sample(PROMPTS, 2)
        body["prompt"] = prompts
    elif kind < 0.3:
        prompts = [llm.encode(each) for each in rng.sample(PROMPTS, rng.choice([1, 3]))]
        body["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    else:
        body["prompt"] = prompts[0]
        if rng.random() < 0.2:
            body |= {"echo": True, "logprobs": 1}
    params = {**made, "max_tokens": length}
    if "seed" in made and rng.random() < 0.25:
        params["n"] = 2
    return Asked(COMPLETIONS, {**body, **params}, prompts, SamplingParams(**params))


def _chat(rng: random.Random, llm: LLM) -> Asked:
    formed = rng.random() < 0.3
    made = _sampling(rng, has_stops=not formed)
    messages = [{"role": "user", "content": rng.choice(PROMPTS)}]
    if rng.random() < 0.3:
        messages = [{"role": "system", "content": "Write Python."}, *messages]
    params = {**made, "max_tokens": 60 if formed else rng.randrange(1, 40)}
    body = {"messages": messages, **params}
    if formed:
        return Asked(
            CHAT,
            {**body, "response_format": _FORM},
            [messages],
            SamplingParams(**params, grammar=Grammar.json_schema(SCHEMA)),
        )
    return Asked(CHAT, body, [messages], SamplingParams(**params))


def _response(rng: random.Random, llm: LLM) -> Asked:
    made, length = _sampling(rng), rng.randrange(1, 40)
    text = rng.choice(PROMPTS)
    messages = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": text}]
    body = {"input": text, "instructions": "Write Python.", "max_output_tokens": length, **made}
    return Asked(RESPONSES, body, [messages], SamplingParams(**made, max_tokens=length))


def _ollama(rng: random.Random, llm: LLM) -> Asked:
    made, length = _sampling(rng), rng.randrange(1, 40)
    params = SamplingParams(**made, max_tokens=length)
    options = {"repeat_penalty" if name == "repetition_penalty" else name: value for name, value in made.items()}
    body = {"options": {**options, "num_predict": length, "num_gpu": 1}, "keep_alive": "5m"}
    prompt = rng.choice(PROMPTS)
    messages: list[Any] = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": prompt}]
    kind = rng.randrange(3)
    if kind == 0:
        return Asked(OLLAMA_CHAT, {**body, "messages": messages}, [messages], params)
    if kind == 1:
        return Asked(GENERATE, {**body, "prompt": prompt, "system": "Write Python."}, [messages], params)
    return Asked(GENERATE, {**body, "prompt": prompt, "raw": True}, [prompt], params)


def read(asked: Asked, text: str, *, cut: bool = False) -> Answer:
    """The answer that a response's body holds.

    Args:
        cut: the client has left, so that the end is missing.
    """
    if asked.url in OLLAMA:
        return _read_lines(asked, text, cut)
    if asked.body["stream"]:
        return _read_stream(asked, text, cut)
    body = json.loads(text)
    if asked.url == RESPONSES:
        return [(_output_text(body), _reason(body["status"]))]
    texts = [choice["message"]["content"] if asked.url == CHAT else choice["text"] for choice in body["choices"]]
    return [(each, choice["finish_reason"]) for each, choice in zip(texts, body["choices"])]


def _read_stream(asked: Asked, text: str, cut: bool) -> Answer:
    count = len(asked.prompts) * asked.params.n
    texts, reasons = [""] * count, [None] * count
    whole = [part for part in text.replace("\r\n", "\n").split("\n\n")[:-1] if "data: " in part]
    events = [part.split("data: ", 1)[1] for part in whole]
    if not cut and asked.url != RESPONSES:
        assert events.pop() == "[DONE]"
    for event in map(json.loads, (each for each in events if each != "[DONE]")):
        assert "error" not in event or event["error"] is None, event
        if asked.url == RESPONSES:
            texts[0] += event["delta"] if event["type"] == "response.output_text.delta" else ""
            reasons[0] = _reason(event["type"].removeprefix("response.")) or reasons[0]
            continue
        for choice in event["choices"]:
            piece = choice["delta"].get("content") if asked.url == CHAT else choice["text"]
            texts[choice["index"]] += piece or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return list(zip(texts, reasons))


def _read_lines(asked: Asked, text: str, cut: bool) -> Answer:
    whole = text if asked.body["stream"] else f"{text}\n"
    lines = [json.loads(line) for line in whole.split("\n")[:-1]]
    assert not any("error" in line for line in lines) and (cut or lines[-1]["done"])
    said = "".join(line["message"]["content"] if asked.url == OLLAMA_CHAT else line["response"] for line in lines)
    return [(said, lines[-1].get("done_reason") if lines else None)]


def _output_text(body: dict[str, Any]) -> str:
    parts = [part for item in body["output"] for part in item["content"]]
    assert all(part["type"] == "output_text" for part in parts)
    return "".join(part["text"] for part in parts)


def _reason(status: str) -> Any:
    return {"completed": "stop", "incomplete": "length"}.get(status)
