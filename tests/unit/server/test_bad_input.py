"""What cannot be served is a status of its own and an error body of OpenAI's, and disturbs nobody."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import transformers

from forerun.models.loading.gguf.tokenizer import read_tokenizer
from forerun.server.protocol.bodies import SAME_NAMES
from gguf_metadata import byte_level
from serving import NAME, Served
from small_tokenizers import END

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK = {"messages": [{"role": "user", "content": "a"}]}
DEEP = b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}"

BROKEN: dict[str, tuple[str, bytes, int]] = {
    "no JSON": (CHAT, b"{", 400),
    "nothing": (CHAT, b"", 400),
    "no UTF-8": (CHAT, b'{"messages": "\xff"}', 400),
    "no object": (CHAT, b"[1]", 400),
    "null": (COMPLETIONS, b"null", 400),
    "deep nesting": (CHAT, DEEP, 400),
    "a number of many digits": (COMPLETIONS, b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
    "too large": (COMPLETIONS, b'{"prompt": "' + b"a" * (5 << 20) + b'"}', 413),
    "text for tokens": ("/detokenize", b'{"tokens": "a"}', 400),
    "neither": ("/tokenize", b"{}", 400),
    "tools without messages": ("/tokenize", b'{"prompt": "a", "tools": []}', 400),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "no messages": (CHAT, {}, "messages"),
    "an empty chat": (CHAT, {"messages": []}, "messages"),
    "an empty chat to tokenize": ("/tokenize", {"messages": []}, "messages"),
    "an empty chat of Anthropic's": ("/v1/messages", {"messages": [], "max_tokens": 1}, "messages"),
    "messages of a wrong type": (CHAT, {"messages": "a"}, "messages"),
    "a message without content": (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
    ),
    "half a character": (COMPLETIONS, {"prompt": "\ud800"}, None),
    "an empty prompt": (COMPLETIONS, {"prompt": []}, "prompt"),
    "a prompt of mixed kinds": (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    "a token out of range": (COMPLETIONS, {"prompt": [1, 100_000]}, "prompt"),
    "a negative token": (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    "a prompt beyond the context": (COMPLETIONS, {"prompt": "a" * 5000}, "prompt"),
    "a temperature": (CHAT, {**TALK, "temperature": -1}, "temperature"),
    "a temperature of text": (CHAT, {**TALK, "temperature": "hot"}, "temperature"),
    "n of 0": (CHAT, {**TALK, "n": 0}, "n"),
    "too many stops": (CHAT, {**TALK, "stop": ["a"] * 300_000}, "stop"),
    "an empty stop": (CHAT, {**TALK, "stop": [""]}, "stop"),
    "a bias of an unknown token": (CHAT, {**TALK, "logit_bias": {"100000": 1}}, None),
    "top_logprobs alone": (CHAT, {**TALK, "top_logprobs": 2}, "logprobs"),
    "too many top_logprobs": (CHAT, {**TALK, "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    "two lengths": (CHAT, {**TALK, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    "min above max": (CHAT, {**TALK, "max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    "choices that would be the same": (CHAT, {**TALK, "temperature": 0, "n": 2}, "n"),
    "a misspelt field": (CHAT, {**TALK, "temperatur": 1}, "temperatur"),
    "a field of others": (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
    "a schema": (CHAT, {**TALK, "response_format": {"type": "xml"}}, "response_format"),
    "blanks": (CHAT, {**TALK, "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    "a tool that the server would have to run": (
        CHAT,
        {**TALK, "tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp", "server_label": "a"}},
        "tool_choice",
    ),
    "drafts without a stream": (CHAT, {**TALK, "stream_options": {"include_drafts": True}}, "stream_options"),
    "odd stream options": (CHAT, {**TALK, "stream": True, "stream_options": {"all": True}}, "stream_options"),
    "a template's function's option": (
        CHAT,
        {**TALK, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
    ),
    "a prediction nobody reads": (CHAT, {**TALK, "prediction": {"type": "content", "content": "a"}}, None),
    "streamed logprobs of an echo": (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    "too many choices": (COMPLETIONS, {"prompt": ["a"] * 100, "n": 100, "seed": 1}, "prompt"),
    "tokens beyond the vocabulary": ("/detokenize", {"tokens": [99_999]}, "tokens"),
    "text and chat": ("/tokenize", {**TALK, "prompt": "a"}, "prompt"),
}


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize(("path", "content", "status"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_body(http: httpx.Client, path: str, content: bytes, status: int) -> None:
    response = http.post(path, content=content)
    assert response.status_code == status
    error_of(response)


@pytest.mark.parametrize(("path", "body", "param"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_cannot_be_served(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, stream: bool
) -> None:
    if stream and path in (CHAT, COMPLETIONS) and "stream_options" not in body:
        body = {**body, "stream": True}
    response = http.post(path, content=json.dumps(body))
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert len(error["message"]) < 600


def test_paths_and_methods(http: httpx.Client) -> None:
    missing = http.get("/v1/nothing")
    assert missing.status_code == 404 and CHAT in error_of(missing)["message"]
    for path, known in (("/chat/completions", CHAT), ("/v1/v1/models", "/v1/models"), ("/completions", COMPLETIONS)):
        assert f"Did you mean {known}?" in error_of(http.post(path, json={}))["message"]
    for path in ("/v1/embeddings", "/embeddings", "/rerank"):
        assert "computes no embeddings" in error_of(http.post(path, json={"input": "a"}))["message"]
    assert http.get(CHAT).status_code == 405 and error_of(http.get(CHAT))
    assert http.delete("/v1/models").status_code == 405


def test_others_are_undisturbed(served: Served, http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": "hello", "seed": 3, "max_tokens": 9}
    before = http.post(COMPLETIONS, json=body).json()["choices"]
    for path, content, _ in BROKEN.values():
        http.post(path, content=content)
    assert http.post(COMPLETIONS, json=body).json()["choices"] == before
    served.settle()


def test_tokens_of_text_and_back(http: httpx.Client, served: Served) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == served.llm.tokenizer.eos_token and info["chat_template"] and info["bos_token"] is None
    made = http.post("/tokenize", json={"model": NAME, "prompt": "hello wörld"}).json()
    assert made["tokens"] == served.llm.encode("hello wörld") and made["count"] == len(made["tokens"])
    assert made["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "hello wörld"}
    chat = http.post("/tokenize", json=TALK).json()["tokens"]
    assert chat == served.llm.encode(TALK["messages"])
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert info["tokenizer_class"] == type(served.llm.tokenizer).__name__
    named = http.post("/tokenize", json={"prompt": "hello wörld", "return_token_strs": True}).json()
    assert named["token_strs"] == served.llm.tokenizer.convert_ids_to_tokens(made["tokens"])
    assert "token_strs" not in made


def test_what_is_told_of_other_tokenizers(served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = read_tokenizer(byte_level(), "m.gguf")
    monkeypatch.setattr(served.llm, "tokenizer", tokenizer)
    kind = http.get("/tokenizer_info").json()["tokenizer_class"]
    assert isinstance(tokenizer.full, getattr(transformers, kind))
    refused = http.post("/tokenize", json={**TALK, "chat_template_kwargs": {"chat_template": "a"}})
    assert refused.status_code == 400 and error_of(refused)["param"] == "chat_template_kwargs"
    monkeypatch.setattr(served.llm, "tokenizer", None)
    assert http.get("/tokenizer_info").json()["tokenizer_class"] is None
    found = http.post("/tokenize", json={"prompt": "", "return_token_strs": True})
    assert found.status_code == 200 and found.json()["tokens"] == found.json()["token_strs"] == []


def test_special_tokens_of_a_text_are_kept(http: httpx.Client, served: Served) -> None:
    """Tokens to text and back lose nothing; what is left out is left out on request."""
    text = f"hello{END}world{END}"
    ids = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert served.llm.tokenizer.eos_token_id in ids
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}
    left = http.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True}).json()
    assert left == {"prompt": "helloworld"}


def test_tokens_of_a_chat_with_all_that_its_template_reads(http: httpx.Client, served: Served) -> None:
    template = served.llm.tokenizer.chat_template
    try:
        written = "{{ messages[0].content }}{{ tools[0].function.name if tools }}{{ '!' if add_generation_prompt }}"
        with_tools = "{{ raise_exception('none') if not tools }}"
        served.llm.tokenizer.chat_template = {"default": written, "tool_use": with_tools + written}
        tool = {"type": "function", "function": {"name": "world"}}
        for more, said in (
            ({}, "a!"),
            ({"add_generation_prompt": False}, "a"),
            ({"tools": []}, "a!"),
            ({"tools": [tool], "add_generation_prompt": True}, "aworld!"),
        ):
            ids = http.post("/tokenize", json={**TALK, **more}).json()["tokens"]
            assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": said}
    finally:
        served.llm.tokenizer.chat_template = template


def test_the_openapi_schema_names_every_field(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path, name in ((CHAT, "ChatBody"), (COMPLETIONS, "CompletionBody"), ("/v1/responses", "ResponseBody")):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        assert schemas[name]["properties"].keys() >= {*SAME_NAMES, "model", "stream", "speculative"}
    assert schemas["ChatBody"]["properties"]["temperature"]["anyOf"][0] == {
        "type": "number",
        "minimum": 0,
        "maximum": 100,
    }


def test_a_body_of_many_objects_is_refused_before_it_is_read(http: httpx.Client) -> None:
    """Each takes the interpreter some hundreds of nanoseconds, and a stream beside would wait for all of them."""
    response = http.post(CHAT, content=b'{"messages": [' + b"{}," * 300_000 + b"{}]}")
    assert response.status_code == 400 and "opening brackets" in error_of(response)["message"]
    content = json.dumps({"prompt": "[" * 100_000, "max_tokens": 1}).encode()
    assert "characters" in error_of(http.post(COMPLETIONS, content=content))["message"]
