"""Ollama's API: the answers of the other APIs' twins, in its form, and as its clients call it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from sse_starlette.sse import EventSourceResponse

from doubles import FakeModel
from forerun import LLM, Generation
from forerun.engine.results import Choice, SequenceStats, StepOutput, StreamChunk
from forerun.errors import RequestBodyError
from forerun.server.ollama import RUNNING
from forerun.server.protocol.answers import Asked
from forerun.server.protocol.bodies import validated
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.ollama_api import GenerateBody, OllamaChatBody, OllamaLines, fill_template
from serving import JSON, NAME, Served, failing_forwards, fake_llm, serving
from small_tokenizers import END, byte_level, ids_of

GENERATE, CHAT = "/api/generate", "/api/chat"
TALK = [{"role": "user", "content": "hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 9}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FIGURES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson") and response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def said(line: dict[str, Any]) -> str:
    return str(line["message"]["content"] if "message" in line else line["response"])


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("kind", ["raw", "generate", "chat"])
def test_the_text_is_that_of_v1(http: httpx.Client, kind: str, speculative: bool) -> None:
    sampling = {"temperature": 0, "max_tokens": 9}
    options = {**GREEDY, "speculative": speculative}
    if kind == "raw":
        twin = http.post("/v1/completions", json={"prompt": "hello", **sampling}).json()
        text = twin["choices"][0]["text"]
    else:
        system = [{"role": "system", "content": "a"}]
        twin = http.post("/v1/chat/completions", json={"messages": [*system, *TALK], **sampling}).json()
        text = twin["choices"][0]["message"]["content"]
    bodies = {
        "raw": {"prompt": "hello", "raw": True},
        "generate": {"prompt": "hello", "system": "a"},
        "chat": {"messages": [{"role": "system", "content": "a"}, *TALK]},
    }
    url = CHAT if kind == "chat" else GENERATE
    body = {"model": f"{NAME}:latest", **bodies[kind], "options": options, "keep_alive": "5m"}
    whole = http.post(url, json={**body, "stream": False}).json()
    assert said(whole) == text and whole["done"] is True and whole["done_reason"] == "length"
    assert whole["model"] == f"{NAME}:latest" and whole["created_at"].endswith("Z")
    assert whole["prompt_eval_count"] == twin["usage"]["prompt_tokens"] and whole["eval_count"] == 9
    assert all(type(whole[name]) is int for name in FIGURES)
    assert whole["total_duration"] >= whole["eval_duration"] >= 1
    *pieces, last = lines_of(http.post(url, json=body))
    assert "".join(map(said, pieces)) == text and said(last) == ""
    assert not any(each["done"] for each in pieces) and last["done"] and last["done_reason"] == "length"
    assert {*FIGURES, "eval_count", "prompt_eval_count", "metrics"} <= {*last} and not {*FIGURES} & {*pieces[0]}


def test_a_last_message_of_the_assistant_goes_on(served: Served, http: httpx.Client) -> None:
    messages = [*TALK, {"role": "assistant", "content": "a wor"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 9, "continue_final_message": True}
    twin = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    answer = http.post(CHAT, json={"messages": messages, "options": GREEDY, "stream": False}).json()
    assert answer["message"] == {"role": "assistant", "content": twin}


def test_formats(http: httpx.Client) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Lima"]}}, "required": ["city"]}
    options = {"options": {**GREEDY, "num_predict": 99}, "stream": False}
    form = {**schema, "additionalProperties": False}
    for url, body in ((GENERATE, {"prompt": "hello"}), (CHAT, {"messages": TALK})):
        answer = http.post(url, json={**body, **options, "format": form}).json()
        assert json.loads(said(answer))["city"] in ("Oslo", "Lima")
    response_format = {"type": "json_object"}
    chat = {"messages": TALK, "temperature": 0, "max_tokens": 9, "response_format": response_format}
    twin = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    answer = http.post(CHAT, json={"messages": TALK, "options": GREEDY, "stream": False, "format": "json"}).json()
    assert said(answer) == twin and twin.startswith("{")


def test_log_probabilities(http: httpx.Client) -> None:
    body = {"messages": TALK, "logprobs": True, "top_logprobs": 2}
    twin = http.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 9}).json()
    content = twin["choices"][0]["logprobs"]["content"]
    assert http.post(CHAT, json={**body, "options": GREEDY, "stream": False}).json()["logprobs"] == content
    streamed = lines_of(http.post(CHAT, json={**body, "options": GREEDY}))
    assert [entry for line in streamed for entry in line.get("logprobs", ())] == content


@pytest.mark.parametrize(
    ("url", "body"),
    [(GENERATE, {}), (GENERATE, {"prompt": "", "keep_alive": 0}), (CHAT, {}), (CHAT, {"messages": [], "stream": True})],
)
def test_a_request_without_a_prompt_loads(http: httpx.Client, url: str, body: dict[str, Any]) -> None:
    answer = http.post(url, json={"model": NAME, **body}).json()
    assert answer["done"] is True and answer["done_reason"] == "load" and said(answer) == ""


def test_options_by_ollamas_names(served: Served) -> None:
    options = {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["a", "b"],
        "num_predict": 7,
        "repeat_penalty": 1.2,
        "repeat_last_n": -1,
        "presence_penalty": 0.5,
        "frequency_penalty": 1,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "tfs_z": 1.0,
        "typical_p": 1.0,
        "num_ctx": 4096,
        "num_gpu": 1,
        "num_thread": 8,
        "use_mmap": True,
        "num_keep": 5,
        "numa": False,
        "cache_salt": "mine",
    }
    made = validated(GenerateBody, {"prompt": "a", "options": options}).request(4096, {"top_k": 5, "min_p": 0.3})
    params = made.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 20, 0.9, 0.1, 3)
    assert (params.max_tokens, params.repetition_penalty, [*params.stop]) == (7, 1.2, ["a", "b"])
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, 1)
    assert made.stream and params.tenant == "mine"
    for unlimited in (-1, -2, None):
        given = {"prompt": "a", "stream": False, "options": {"num_predict": unlimited, "repeat_last_n": 64}}
        given |= {"truncate": True, "shift": True}
        made = validated(GenerateBody, given).request(4096, {"top_k": 5})
        assert made.params.max_tokens == 4096 and made.params.top_k == 5 and not made.stream
        assert made.params.temperature == 1  # the server's default, not Ollama's


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mirostat": (GENERATE, {"options": {"mirostat": 2}}, "options.mirostat is 2"),
    "tfs_z": (GENERATE, {"options": {"tfs_z": 0.5}}, "options.tfs_z is 0.5"),
    "a window of penalties": (
        CHAT,
        {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
        "options.repeat_last_n is 64",
    ),
    "num_ctx": (
        GENERATE,
        {"options": {"num_ctx": 8192}},
        "options.num_ctx is 8192, but must be a whole number in 1..4",
    ),
    "num_predict": (GENERATE, {"options": {"num_predict": 0}}, "options.num_predict is 0, but must be"),
    "temperature": (CHAT, {"options": {"temperature": "hot"}}, "options.temperature is 'hot'"),
    "repeat_penalty": (CHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0, but must be"),
    "an option that is none": (CHAT, {"options": {"temperatur": 1}}, "Did you mean 'temperature'?"),
    "two names of one": (CHAT, {"options": {"num_predict": 1, "max_tokens": 2}}, "are the same"),
    "n": (CHAT, {"options": {"n": 2}}, "options.n is 2"),
    "images": (GENERATE, {"images": ["aGk="]}, "images are not read"),
    "images in a message": (CHAT, {"messages": [{**TALK[0], "images": ["aGk="]}]}, "messages have images"),
    "context": (GENERATE, {"context": [1, 2]}, "context is not read"),
    "raw and system": (GENERATE, {"raw": True, "system": "a"}, "raw is for a whole prompt"),
    "raw and suffix": (GENERATE, {"raw": True, "suffix": "a"}, "raw is for a whole prompt"),
    "a template's loop": (GENERATE, {"template": "{{ range .Messages }}{{ end }}"}, "template holds range .Messages"),
    "format": (GENERATE, {"format": "xml"}, 'but must be "json", or a JSON schema'),
    "think": (CHAT, {"think": "a lot"}, "think is a string"),
    "truncate": (CHAT, {"truncate": 3}, "truncate is not supported, other than True or False"),
    "a prompt that is not cut": (GENERATE, {"prompt": "a" * 5000, "truncate": True, "shift": True}, "4096"),
    "a field of others": (GENERATE, {"width": 512}, "width is not supported"),
    "tools": (CHAT, {"tools": [TOOL]}, "tools cannot be used with this model"),
    "tools of a wrong type": (CHAT, {"tools": [{"type": "web"}]}, "tools"),
    "an answer that is too long": (GENERATE, {"prompt": "a" * 5000}, "4096"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("url", "fields", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(http: httpx.Client, url: str, fields: dict[str, Any], words: str, stream: bool) -> None:
    body = {"prompt": "a"} if url == GENERATE else {"messages": TALK}
    response = http.post(url, json={**body, **fields, "stream": stream})
    assert response.status_code == 400 and {*response.json()} == {"error"}
    assert words in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("POST", CHAT, b'{"model": "it", "messages": [{"role"', 400, "it is not JSON"),
        ("POST", GENERATE, b"", 400, "it is not JSON"),
        ("POST", GENERATE, b'{"prompt": "' + b"a" * (8 << 20) + b'"}', 413, "larger than 4 MiB"),
        ("POST", GENERATE, b'{"model": "llama3.2", "prompt": "a"}', 404, "'it'"),
        ("POST", "/api/show", b'{"name": "llama3.2"}', 404, "'it'"),
        ("POST", "/api/embed", b"{}", 501, "computes no embeddings"),
        ("POST", "/api/embeddings", b"{}", 501, "computes no embeddings"),
        ("POST", "/api/pull", b"{}", 501, "forerun fetch"),
        ("POST", "/api/create", b"{}", 501, "one model"),
        ("POST", "/api/copy", b"{}", 501, "one model"),
        ("POST", "/api/push", b"{}", 501, "one model"),
        ("POST", "/api/blobs/sha256:12", b"{}", 501, "one model"),
        ("DELETE", "/api/delete", b"{}", 501, "one model"),
        ("GET", CHAT, b"", 405, "not for this method"),
        ("GET", "/api/tag", b"", 404, "Did you mean /api/tags?"),
    ],
)
def test_errors_have_ollamas_form(
    http: httpx.Client, method: str, path: str, content: bytes, status: int, words: str
) -> None:
    response = http.request(method, path, content=content)
    assert response.status_code == status and {*response.json()} == {"error"}
    assert words in response.json()["error"]


def test_pings_are_lines_that_add_nothing(served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"prompt": "hello", "options": GREEDY}
    wanted = "".join(map(said, lines_of(http.post(GENERATE, json=body))))
    monkeypatch.setattr(EventSourceResponse, "DEFAULT_PING_INTERVAL", 0.01)
    monkeypatch.setattr(served.llm.target, "before_forward", lambda _: time.sleep(0.05))
    lines = lines_of(http.post(GENERATE, json=body))
    assert "".join(map(said, lines)) == wanted
    assert len([line for line in lines if not said(line) and not line["done"]]) > 2


def test_a_failure_in_a_stream(served: Served, http: httpx.Client) -> None:
    with failing_forwards(served.llm):
        told = lines_of(http.post(GENERATE, json={"prompt": "hello", "options": {"ignore_eos": True}}))
    assert {*told[-1]} == {"error"} and "secret" not in str(told)


def test_what_is_told_of_the_model(http: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.get("/", headers={"accept": "*/*"}).text == http.get("/").text == RUNNING
    assert http.head("/").status_code == http.head("/api/version").status_code == 200
    assert "<html" in http.get("/", headers={"accept": "text/html,*/*"}).text
    version = http.get("/api/version").json()["version"]
    assert all(part.isdecimal() for part in version.split(".")) and version.count(".") == 2
    (listed,) = http.get("/api/tags").json()["models"]
    assert listed["name"] == listed["model"] == f"{NAME}:latest" and len(listed["digest"]) == 64
    (running,) = http.get("/api/ps").json()["models"]
    assert running["context_length"] == 4096 and running["digest"] == listed["digest"] and running["expires_at"]
    monkeypatch.setattr(served.llm.target, "architecture", "qwen2", raising=False)
    told = http.post("/api/show", json={"name": f"{NAME}:latest"}).json()
    assert told == http.post("/api/show", json={"model": NAME, "verbose": True}).json()
    # as Go's ShowRequest is written, which leaves nothing out
    go: dict[str, Any] = {"model": "", "system": "", "template": "", "verbose": False, "options": None, "name": NAME}
    assert told == http.post("/api/show", json=go).json() == http.post("/api/show", json={**go, "options": {}}).json()
    for more in ({"system": "a"}, {"template": "a"}, {"options": {"seed": 1}}):
        (name,) = more
        assert http.post("/api/show", json=go | more).json()["error"].startswith(name)
    assert told["capabilities"] == ["completion"] and told["details"]["family"] == "qwen2"
    assert told["model_info"]["qwen2.context_length"] == 4096
    assert {*told["details"]} == {
        *("parent_model", "format", "family", "families", "parameter_size", "quantization_level")
    }
    tokenizer = served.llm.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools }}<tool_call></tool_call><think></think>")
    monkeypatch.setattr(served.service, "texts", ModelTexts(tokenizer))
    assert http.post("/api/show", json={"name": NAME}).json()["capabilities"] == ["completion", "tools", "thinking"]


def test_the_key_is_needed() -> None:
    with serving(fake_llm(), api_key=("one",)) as served, httpx.Client(base_url=served.url, headers=JSON) as http:
        assert http.get("/").text == RUNNING
        refused = http.get("/api/tags")
        assert refused.status_code == 401 and {*refused.json()} == {"error"}
        assert http.get("/api/tags", headers={"authorization": "Bearer one"}).status_code == 200


def test_templates() -> None:
    values = {"System": "", "Prompt": "hi", "Suffix": ""}
    template = "{{- if .System }}<s>{{ .System }}</s>\n{{ end }}<u>{{ .Prompt }}</u>\n<a>{{ .Response }}</a>"
    assert fill_template(template, values) == "<u>hi</u>\n<a>"
    assert fill_template(template, {**values, "System": "be"}) == "<s>be</s>\n<u>hi</u>\n<a>"
    fim = "{{ if .Suffix }}<p>{{ .Prompt }}<s>{{ .Suffix }}<m>{{ else -}}\n  {{ .Prompt }}  {{- end }}"
    assert fill_template(fim, values) == "hi" and fill_template(fim, {**values, "Suffix": "x"}) == "<p>hi<s>x<m>"
    assert fill_template("{{ .Prompt }}", {**values, "Prompt": "{{ .System }}"}) == "{{ .System }}"
    for odd in ("{{ if .System }}", "{{ end }}", "{{ else }}", "{{ .Tools }}", "{{ if eq .Prompt 1 }}{{ end }}"):
        with pytest.raises(RequestBodyError, match="template"):
            fill_template(odd, values)


def test_a_template_is_the_prompt(http: httpx.Client) -> None:
    twin = http.post("/v1/completions", json={"prompt": "a: hello\nb:", "temperature": 0, "max_tokens": 9}).json()
    body = {"prompt": "hello", "system": "a", "template": "{{ .System }}: {{ .Prompt }}\nb:{{ .Response }}"}
    answer = http.post(GENERATE, json={**body, "options": GREEDY, "stream": False}).json()
    assert answer["response"] == twin["choices"][0]["text"]


def test_a_suffix(http: httpx.Client, served: Served) -> None:
    body = {"prompt": "def f(", "suffix": "):", "options": GREEDY, "stream": False}
    refused = http.post(GENERATE, json=body)
    assert refused.status_code == 400 and "no tokens that fill in the middle" in refused.json()["error"]
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]})
    tokenizer.chat_template = served.llm.tokenizer.chat_template
    fake: Any = FakeModel(vocab_size=len(tokenizer), eos_token_ids=ids_of(tokenizer, END))
    with serving(LLM(fake, tokenizer=tokenizer)) as filling, httpx.Client(base_url=filling.url, headers=JSON) as http:
        of_v1 = {"prompt": "def f(", "suffix": "):", "temperature": 0, "max_tokens": 9}
        twin = http.post("/v1/completions", json=of_v1).json()["choices"][0]["text"]
        assert http.post(GENERATE, json=body).json()["response"] == twin
        pieces = lines_of(http.post(GENERATE, json={**body, "stream": True, "keep_alive": 1800}))
        assert "".join(map(said, pieces)) == twin
        assert http.post(GENERATE, json={**body, "prompt": ""}).json()["done_reason"] == "length"
        told = http.post("/api/show", json={"name": NAME}).json()
        assert "insert" in told["capabilities"] and ".Suffix" in told["template"]


def test_turns_are_messages_of_a_chat() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        *TALK,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, {"function": {"name": "time"}}]},
        {"role": "tool", "tool_name": "time", "content": "noon"},
        {"role": "tool", "content": "dry"},
    ]
    made = validated(OllamaChatBody, {"messages": messages, "tools": [TOOL], "think": "low"}).request(4096, {})
    (chat,) = made.prompts
    first, second = chat[1]["tool_calls"]
    assert first["function"] == call["function"] and second["function"] == {"name": "time", "arguments": {}}
    assert first["id"] != second["id"] and first["id"].isalnum() and len(first["id"]) == 9
    assert chat[1]["reasoning_content"] == "hm"
    assert chat[2] == {"role": "tool", "content": "noon", "tool_call_id": second["id"], "name": "time"}
    assert chat[3] == {"role": "tool", "content": "dry", "tool_call_id": first["id"]}
    assert [*made.tools] == [TOOL] and made.template_options == {"enable_thinking": True, "reasoning_effort": "low"}
    named = {**call, "id": "call_x"}
    messages = [*TALK, {"role": "assistant", "tool_calls": [named]}, {"role": "tool", "content": "dry"}]
    (chat,) = validated(OllamaChatBody, {"messages": messages, "think": False}).request(4096, {}).prompts
    assert chat[2]["tool_call_id"] == "call_x"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thinking_and_calls(size: int) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    text = f"<think>\nhm\n</think>\n\nLet me see.\n{call}\n{call}"
    request = validated(OllamaChatBody, {"messages": TALK, "tools": [TOOL], "model": NAME}).request(4096, {})
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ tools }} <tool_call> </tool_call> <think> </think>"

    def form() -> OllamaLines:
        return OllamaLines(Asked(ModelTexts(tokenizer), request, [[1]], NAME, "7", created=3))

    choice = Choice(0, text, [1], None, "stop", SequenceStats())
    generations = [Generation([1], [choice])]
    whole = form().whole(generations)
    message = whole["message"]
    assert (message["content"], message["thinking"], whole["done_reason"]) == ("Let me see.", "hm", "stop")
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert [each["function"] for each in message["tool_calls"]] == [function] * 2
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    streamed, lines = form(), []
    for at in range(0, len(text), size):
        ends = at + size >= len(text)
        chunk = StreamChunk(text[at : at + size], [1], finish_reason="stop" if ends else None)
        lines += streamed.of(0, StepOutput(1, chunk, choice if ends else None))
    told = [line["message"] for line in [*lines, *streamed.last(generations)]]
    assert "".join(each["content"] for each in told) == message["content"]
    assert "".join(each.get("thinking", "") for each in told) == message["thinking"]
    assert [each for part in told for each in part.get("tool_calls", ())] == message["tool_calls"]


CONTINUE: dict[str, Any] = {
    "options": {
        "temperature": 0.01,
        "num_predict": 9,
        "stop": ["<|fim_prefix|>", "\n\n", "/src/"],
        "num_ctx": 4096,
        "num_thread": 4,
        "use_mmap": True,
    },
    "keep_alive": 1800,
}
"""What Continue's provider "ollama" sends with each prompt; what is undefined there, JSON leaves out."""


def test_as_continue_calls_it(http: httpx.Client) -> None:
    """It takes the lines of `parameters` apart by its own pattern, and calls its default stream."""
    told = http.post("/api/show", json={"name": NAME}).json()
    lines = dict(line.split() for line in told["parameters"].split("\n"))
    assert lines["num_ctx"] == "4096" and "template" in told
    body = {"model": NAME, "prompt": "def add(a, b):\n    return ", "raw": True, **CONTINUE}
    *_, last = lines_of(http.post(GENERATE, json=body))
    assert last["done"]
    *_, last = lines_of(http.post(CHAT, json={"model": NAME, "messages": TALK, "stream": True, **CONTINUE}))
    assert last["done"]
    assert http.post(CHAT, json={"model": NAME, "messages": TALK, "stream": False, **CONTINUE}).json()["done"]
