"""Random bodies of every path: never a 5xx, a hang, a broken stream, or an answer that no client can read."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, note, strategies as st

from fuzzing import examples
from mixed_requests import CHAT, COMPLETIONS, DRAFTERS, PROMPTS, RESPONSES, SCHEMA, load
from serving import LIMIT, Served, serving

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for message in messages %}"
    "# {{ message.role + ': ' + (message.content or '') | trim }}\n"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ mood }}# answer:\n"
)
"""Fails on what others fail on too, such as a role that is no text."""
TOKENIZE, DETOKENIZE, MESSAGES_URL, INFILL = "/tokenize", "/detokenize", "/v1/messages", "/infill"
OLLAMA = (GENERATE, OLLAMA_CHAT) = ("/api/generate", "/api/chat")
SECONDS = 1.0
"""After which the server ends a request: those that ask for thousands of tokens are to be quick, too."""
FORM = {"name": "it", "schema": SCHEMA}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "A function.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = [
    [{"role": "user", "content": PROMPTS[0]}],
    [{"role": "system", "content": "Write Python."}, {"role": "user", "content": [{"type": "text", "text": "x = "}]}],
    [
        {"role": "user", "content": "f"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
]
SAMPLING: dict[str, list[Any]] = {
    "model": ["it"],
    "temperature": [0, 0.7, 1],
    "top_p": [0.9, 1e-9],
    "top_k": [1, 20],
    "min_p": [0.1],
    "repetition_penalty": [1.1],
    "presence_penalty": [-2, 0.5],
    "frequency_penalty": [2],
    "logit_bias": [{"17": -5, "20": 100}, {}, {"3": -100.0}],
    "min_tokens": [2],
    "stop": ["\n", ["self", "é"], []],
    "stop_token_ids": [[5, 6]],
    "ignore_eos": [True],
    "seed": [0, 3, 2**63 - 1],
    "priority": [1],
    "prediction": [{"type": "content", "content": "    return a"}],
    "speculative": [True, False, "suffix", "recycling:num_draft_tokens=2", {"drafter": "none"}],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True],
    "skip_special_tokens": [True],
    "stream": [True],
}
"""Fields of bodies -> sound values."""
KEPT = "resp_kept"
"""Stands for a response that the server keeps."""
OF_OLLAMA: dict[str, list[Any]] = {
    "model": ["it", "it:latest"],
    "options": [
        {"temperature": 0, "num_predict": 12, "num_ctx": 128, "num_gpu": 1, "mirostat": 0},
        {"temperature": 0.7, "top_k": 20, "seed": 3, "repeat_penalty": 1.1, "repeat_last_n": -1, "num_predict": -1},
        {"stop": ["self", "é"], "speculative": "suffix", "num_predict": 12},
    ],
    "format": ["json", SCHEMA, ""],
    "keep_alive": [0, "5m", -1],
    "think": [True, False],
    "logprobs": [True],
    "top_logprobs": [2],
    "stream": [True, False],
}
MORE: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        "messages": MESSAGES,
        "max_tokens": [1, 12],
        "n": [2],
        "logprobs": [True],
        "top_logprobs": [0, 3],
        "tools": [[TOOL], [TOOL, TOOL], [TOOL, {"type": "custom", "custom": {"name": "g"}}, {"type": "web_search"}]],
        "tool_choice": ["auto", "none", "required"],
        "reasoning_effort": ["low"],
        "verbosity": ["low"],
        "stream_options": [{"include_usage": True, "include_drafts": True}],
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": FORM}],
        "chat_template_kwargs": [{"mood": "glad "}],
    },
    COMPLETIONS: {
        "prompt": [*PROMPTS[:3], [1, 2, 3], ["a", "b"], [[4, 5], [6]]],
        "suffix": ["", "    return a\n"],
        "max_tokens": [1, 12],
        "n": [3],
        "echo": [True],
        "logprobs": [0, 4],
        "stream_options": [{"include_usage": True}],
        "structured_outputs": [{"regex": "[ab]+"}, {"choice": ["yes", "no"]}, {"grammar": 'start: "a" | "b"'}],
    },
    RESPONSES: {
        "input": ["x = ", [{"role": "user", "content": [{"type": "input_text", "text": "x = "}]}]],
        "instructions": ["Write Python."],
        "max_output_tokens": [1, 12],
        "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"]],
        "top_logprobs": [2],
        "tools": [
            [{"type": "function", "name": "f", "parameters": {}}, {"type": "namespace", "name": "g", "tools": []}]
        ],
        "tool_choice": ["auto", {"type": "web_search"}],
        "reasoning": [{"effort": "low", "summary": "auto"}],
        "truncation": ["auto"],
        "client_metadata": [{"a": "b"}],
        "previous_response_id": [KEPT],
        "text": [{"format": {"type": "text"}}, {"format": {"type": "json_schema", **FORM}}],
    },
    MESSAGES_URL: {
        "messages": [
            [{"role": "user", "content": "x = "}],
            [
                {"role": "user", "content": [{"type": "text", "text": "f"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
            ],
        ],
        "max_tokens": [1, 12],
        "system": ["Write Python.", [{"type": "text", "text": "Write."}]],
        "stop_sequences": [["self", "é"]],
        "tools": [[{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "g"}]],
        "tool_choice": [{"type": "auto"}, {"type": "none"}, {"type": "any"}, {"type": "tool", "name": "g"}],
        "context_management": [{"edits": []}],
        "thinking": [{"type": "enabled", "budget_tokens": 5}],
        "output_config": [{"format": {"type": "json_schema", "schema": SCHEMA}}, {"effort": "low"}],
    },
    GENERATE: OF_OLLAMA
    | {
        "prompt": [*PROMPTS[:3], ""],
        "raw": [True],
        "system": ["Write Python."],
        "template": ["{{ if .System }}{{ .System }}{{ end }}{{ .Prompt }}{{ .Response }}"],
        "suffix": ["", "return a"],
    },
    OLLAMA_CHAT: OF_OLLAMA
    | {
        "messages": [
            MESSAGES[0],
            [
                {"role": "user", "content": "f"},
                {"role": "assistant", "thinking": "a", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "tool_name": "f", "content": "2"},
            ],
        ],
        "tools": [[TOOL], []],
    },
    INFILL: {
        "input_prefix": ["", "def f(a):\n"],
        "input_suffix": ["", "\n\nf(1)\n<|endoftext|>"],
        "prompt": ["    ret", ""],
        "input_extra": [[], [{"filename": "a.py", "text": "a = 1\n"}, {"text": "b"}]],
        "n_predict": [0, 1, 12],
        "n_cmpl": [1],
        "n_indent": [0, 4],
        "t_max_predict_ms": [1, 500],
        "samplers": [[], ["top_k", "infill"]],
        "repeat_penalty": [1.1],
        "response_fields": [["content", "timings/prompt_n"], [""]],
        "return_tokens": [True],
        "cache_prompt": [True],
    },
}
SURE = (
    "input_prefix",
    "input_suffix",
    "n_predict",
    "messages",
    "prompt",
    "input",
    "max_tokens",
    "max_output_tokens",
    "tokens",
)
"""Fields that a sound body has."""
NUMBERS = [0, -1, 1, 2, 129, 4096, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, 5e-324, 1e999]
NUMBERS += [-math.inf, math.nan, 10**5000]
DEEP = "deep"
"""Stands for lists or objects inside each other, up to what is refused: more than functions here could walk through."""
TEXTS = [DEEP, "", "a", "\ud800", "a\udfff\ud83d", "\0", "\u202e\u0301", "🙂é\u200d", "\ufeff", "<tool_call>", "nan"]
TEXTS += ["<|endoftext|>", "1e5", "(a{999}){999}", "(?=a)", "start: start"]
TEXTS += ["word " * 3000, "\n" * 20_000, "a" * 140_000]
OTHERS: list[Any] = [
    None,
    True,
    False,
    [],
    {},
    [None],
    [[]],
    {"": None},
    {"\ud800": 1},
    {"$ref": "#"},
    {"type": "xml"},
    [{"enum": [1e999]}],
]
OTHERS += [["a"] * 300, [1] * 3000, list(range(70_000)), {str(i): 1 for i in range(400)}, [{"type": "image_url"}]]
NAMES = ["", "Stream", "\ud800", "best_of", "suffix", "functions", "type", "content", "x" * 99]
SCHEMA_NAMES = ["$defs", "$ref", "anyOf", "enum", "const", "minItems", "minLength", "pattern", "multipleOf", "items"]


def odd(rng: random.Random) -> Any:
    """What may stand in place of anything."""
    kind = rng.randrange(7)
    if kind < 4:
        return copy.deepcopy(rng.choice((NUMBERS, TEXTS, OTHERS, NAMES)[kind]))
    if kind == 4:
        return rng.choice([rng.randrange(-300, 300), rng.uniform(-2, 2), rng.lognormvariate(0, 99)])
    if kind == 5:
        return "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(6)))
    made: Any = 1
    as_list, depth = rng.random() < 0.5, rng.choice([1, 3, 60])
    for _ in range(depth):
        made = [made] if as_list else {rng.choice(["items", "anyOf", "a"]): made}
    return made


def sound(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body that it may answer with 200."""
    url = rng.choice([*[CHAT, COMPLETIONS] * 3, *[RESPONSES, MESSAGES_URL, INFILL, *OLLAMA] * 2, TOKENIZE, DETOKENIZE])
    if url == DETOKENIZE:
        return url, {"tokens": [rng.randrange(500) for _ in range(rng.randrange(5))]}
    if url == TOKENIZE:
        name = rng.choice(["prompt", "messages"])
        return url, {name: copy.deepcopy(rng.choice((MORE[COMPLETIONS] | MORE[CHAT])[name][:2]))}
    fields = MORE[url] if url in OLLAMA else SAMPLING | MORE[url]
    chosen = [name for name in fields if name in SURE]
    chosen += [name for name in rng.sample([*fields], rng.randrange(6)) if name not in chosen]
    body = {name: copy.deepcopy(rng.choice(fields[name])) for name in chosen}
    if rng.random() < 0.5:
        body["stream"] = True
    if "n" in body:
        body["temperature"] = 1
    if "top_logprobs" in body:
        body |= {"include": MORE[RESPONSES]["include"][0]} if url == RESPONSES else {"logprobs": True}
    if "stream" not in body:
        body.pop("stream_options", None)
    return url, body


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each object or list in a value, with a key or an index of it."""
    for key in [*value] if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def mutate(rng: random.Random, body: dict[str, Any]) -> None:
    """Change one place of a body."""
    every = [*places(body)]
    if not every:
        body["prompt"] = odd(rng)
        return
    inside, key = rng.choice(every)
    change = rng.choice(["set", "set", "set", "remove", "wrap", "repeat", "add", "rename", "copy"])
    value = inside[key]
    if change == "remove":
        del inside[key]
    elif change == "wrap":
        inside[key] = [value] if rng.random() < 0.5 else {rng.choice(NAMES): value}
    elif change == "repeat" and isinstance(value, (list, str)):
        inside[key] = value * rng.choice([2, 30, 300])
    elif change == "copy":
        other, name = rng.choice(every)
        inside[key] = copy.deepcopy(other[name])
    elif change == "add" and isinstance(inside, dict):
        inside[rng.choice([*NAMES, *SCHEMA_NAMES, *SAMPLING])] = odd(rng)
    elif change == "rename" and isinstance(inside, dict):
        inside[rng.choice([*NAMES, *SCHEMA_NAMES, *SAMPLING])] = inside.pop(key)
    else:
        inside[key] = odd(rng)


def damage(rng: random.Random, content: bytes) -> bytes:
    """Change the bytes of a body."""
    at = rng.randrange(len(content))
    kind = rng.choice(["cut", "flip", "flip", "insert", "twice", "twice", "follow", "utf-16", "deep"])
    if kind == "cut":
        return content[:at]
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ rng.randrange(1, 256)]) + content[at + 1 :]
    if kind == "insert":
        return content[:at] + rng.randbytes(rng.randrange(1, 5)) + content[at:]
    if kind == "twice":  # a key that is there twice
        name = rng.choice([*SAMPLING, *SURE])
        return b"{" + json.dumps(name).encode() + b":" + written(odd(rng), True) + b"," + content[1:]
    if kind == "follow":
        return content + rng.choice([b"\n", b" null", b"{}", b"\0", b"]"])
    if kind == "utf-16":
        return content.decode(errors="replace").encode("utf-16")
    return b"[" * 20_000 + content


def written(value: Any, ascii_only: bool) -> bytes:
    """A value as JSON, with what JSON does not have: NaN, lone surrogates in bytes, numbers of 5,001 digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**4000:
        return b"1" + b"0" * 5000
    try:
        return json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    except ValueError:  # of such a number deeper inside
        return b"[1" + b"0" * 5000 + b"]"


def request(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body that has been changed in some places, or none."""
    url, body = sound(rng)
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        mutate(rng, body)
    begin, end, depth = *rng.choice([(b"[", b"]"), (b'{"items":', b"}")]), rng.randrange(200, 1100)
    content = written(body, rng.random() < 0.5).replace(f'"{DEEP}"'.encode(), begin * depth + b"1" + end * depth)
    if rng.random() < 0.15:
        content = damage(rng, content)
    others = [CHAT, COMPLETIONS, RESPONSES, MESSAGES_URL, INFILL, *OLLAMA]
    return (url if rng.random() < 0.95 else rng.choice(others)), content


def strict(content: str | bytes) -> Any:
    """A value that any reader of JSON takes: no NaN, no lone surrogates."""
    value = json.loads(content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    json.dumps(value, ensure_ascii=False).encode()
    return value


def check_error(error: Any, url: str) -> None:
    """OpenAI's form, or Ollama's."""
    if url in OLLAMA:
        assert error and isinstance(error, str)
        return
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["message"], str) and isinstance(error["type"], str)
    assert isinstance(error["param"], str | None) and isinstance(error["code"], str | None)


def check_stream(url: str, text: str) -> None:
    """Ends with its end; an error comes last before it."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    data = [each.split("data: ", 1)[1] for each in events if not each.startswith(": ")]
    if url == RESPONSES:
        bodies = [strict(each) for each in data]
        assert [each["sequence_number"] for each in bodies] == [*range(len(bodies))]
        assert bodies[-1]["type"] in ("response.completed", "response.incomplete", "error")
        return
    if url == MESSAGES_URL:
        assert strict(data[-1])["type"] in ("message_stop", "error")
        return
    if url == INFILL:
        assert strict(data[-1]).keys() & {"error", "stop", "content", "timings/prompt_n"} or data[-1] == "{}"
        return
    assert data.pop() == "[DONE]"
    bodies = [strict(each) for each in data]
    for each in bodies[:-1]:
        assert "error" not in each
    if "error" in bodies[-1]:
        check_error(bodies[-1]["error"], url)
        assert bodies[-1]["error"]["type"] != "server_error", bodies[-1]
        return
    begun = {choice["index"] for each in bodies for choice in each["choices"]}
    ended = [choice["index"] for each in bodies for choice in each["choices"] if choice["finish_reason"] is not None]
    assert sorted(ended) == sorted(begun)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    llm = load(drafter=[*DRAFTERS, "prediction"], max_batch=6, seed=0)
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = TEMPLATE
    llm.tokenizer._fill_in = {"fim_pre": 4000, "fim_suf": 4001, "fim_mid": 4002}  # words of the bundled model
    with serving(llm, request_timeout=SECONDS) as served:
        yield served


@pytest.fixture(scope="module")
def http(served: Served) -> Iterator[httpx.Client]:
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=served.url, timeout=LIMIT, headers=headers) as http:
        before = http.post(COMPLETIONS, json=KNOWN).json()["choices"]
        yield http
        served.settle()
        assert http.get("/health").json()["status"] == "ok"
        assert http.post(COMPLETIONS, json=KNOWN).json()["choices"] == before  # what came between has left nothing


@pytest.fixture(scope="module")
def kept(http: httpx.Client) -> bytes:
    """The id of a response."""
    made = http.post(RESPONSES, json={"input": PROMPTS[0], "max_output_tokens": 20}).json()
    return str(made["id"]).encode()


KNOWN = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 20, "logprobs": 2}


@examples(60)
@given(seed=st.integers(0, 2**64))
def test_any_body_is_answered_or_refused(http: httpx.Client, kept: bytes, seed: int) -> None:
    url, content = request(random.Random(f"body {seed}"))  # of which each is as likely: small seeds mean no small body
    note((url, content[:2000]))
    response = http.post(url, content=content.replace(KEPT.encode(), kept))
    text = response.content.decode()  # UTF-8
    if response.status_code != 200:
        assert response.status_code in (400, 404, 408, 413), text
        assert response.headers["content-type"] == "application/json"
        assert set(response.json()) - {"type"} == {"error"}
        check_error(strict(text)["error"], url)
    elif response.headers["content-type"] == "application/x-ndjson":
        *lines, last = map(strict, text.splitlines())
        assert not any(line["done"] for line in lines) and (last.get("done") or {*last} == {"error"})
    elif response.headers["content-type"].startswith("text/event-stream"):
        check_stream(url, text)
    else:
        strict(text)
