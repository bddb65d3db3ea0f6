"""Fields of vLLM's server beside OpenAI's: what they do, and how the answer tells it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from forerun.models import identity
from forerun.server.protocol.requests import parse_body
from serving import NAME, Served, fake_llm, serving
from small_tokenizers import END

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
TEXT = {"prompt": "hello world", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def post(http: httpx.Client, url: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    response = http.post(url, json={**body, **more})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def streamed(http: httpx.Client, url: str, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    response = http.post(url, json={**body, "stream": True, **more})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def refused(http: httpx.Client, url: str, body: dict[str, Any], **more: Any) -> tuple[str, str]:
    response = http.post(url, json={**body, **more})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def ids_in(chunks: list[dict[str, Any]]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk["choices"][0]["token_ids"]]


@pytest.fixture(params=[(CHAT, SAID), (COMPLETIONS, TEXT)], ids=["chat", "completion"])
def asked(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_token_ids_of_prompt_and_answer(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    made = post(http, url, body, return_token_ids=True)
    (choice,) = made["choices"]
    holder = made if url == CHAT else choice
    prompt = {"messages": SAID["messages"]} if url == CHAT else {"prompt": TEXT["prompt"]}
    assert holder["prompt_token_ids"] == post(http, "/tokenize", prompt)["tokens"]
    assert len(choice["token_ids"]) == 6
    chunks = streamed(http, url, body, return_token_ids=True)
    first = chunks[0] if url == CHAT else chunks[0]["choices"][0]
    assert first["prompt_token_ids"] == holder["prompt_token_ids"]
    assert ids_in(chunks) == choice["token_ids"]
    assert not any("prompt_token_ids" in json.dumps(chunk) for chunk in chunks[1:])
    assert "token_ids" not in json.dumps(post(http, url, body))


def test_token_ids_come_with_chunks_that_have_no_text(http: httpx.Client, served: Served) -> None:
    (eos,) = served.llm.target.eos_token_ids
    chunks = streamed(http, COMPLETIONS, TEXT, return_token_ids=True, logit_bias={str(eos): 100}, max_tokens=3)
    assert ids_in(chunks) == [eos] * 3


def test_names_of_tokens_are_ids_on_request(http: httpx.Client) -> None:
    made = post(http, COMPLETIONS, TEXT, logprobs=2, return_tokens_as_token_ids=True, return_token_ids=True)
    (choice,) = made["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    assert all(name.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for name in top)
    chat = post(http, CHAT, SAID, logprobs=True, return_tokens_as_token_ids=True, return_token_ids=True)["choices"][0]
    names = [f"token_id:{each}" for each in chat["token_ids"]]
    assert [each["token"] for each in chat["logprobs"]["content"]] == names


def test_log_probabilities_of_the_prompt(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    made = post(http, url, body, prompt_logprobs=2, return_token_ids=True)
    holder = made if url == CHAT else made["choices"][0]
    ids, found = holder["prompt_token_ids"], holder["prompt_logprobs"]
    assert len(found) == len(ids) and found[0] is None
    for token_id, entry in zip(ids[1:], found[1:]):
        assert str(token_id) in entry and len(entry) in (2, 3)
        assert sorted(each["rank"] for each in entry.values() if each["rank"]) == [1, 2]
        assert all(each["logprob"] <= 0 and isinstance(each["decoded_token"], str) for each in entry.values())
    assert refused(http, url, body, prompt_logprobs=2, stream=True)[0] == "prompt_logprobs"
    assert refused(http, url, body, prompt_logprobs=21)[0] == "prompt_logprobs"


def test_an_echo_lists_as_many_as_it_asks_for_beside_the_prompt_s_own(http: httpx.Client) -> None:
    (choice,) = post(http, COMPLETIONS, TEXT, echo=True, logprobs=1, prompt_logprobs=3)["choices"]
    plain = post(http, COMPLETIONS, TEXT, echo=True, logprobs=1)["choices"][0]
    assert choice["logprobs"] == plain["logprobs"] and "prompt_logprobs" not in plain
    assert {len(entry) for entry in choice["prompt_logprobs"][1:]} <= {3, 4}


def test_an_echo_of_nothing_more_scores_the_prompt(http: httpx.Client) -> None:
    made = post(http, COMPLETIONS, TEXT, echo=True, logprobs=1, max_tokens=0, return_token_ids=True)
    (choice,) = made["choices"]
    whole = post(http, COMPLETIONS, TEXT, echo=True, logprobs=1)["choices"][0]
    size = len(choice["prompt_token_ids"])
    assert choice["text"] == "hello world" and choice["token_ids"] == [] and choice["finish_reason"] == "length"
    assert choice["logprobs"] == {name: values[:size] for name, values in whole["logprobs"].items()}
    assert made["usage"]["completion_tokens"] == 0 and made["usage"]["total_tokens"] == size
    options = {"stream_options": {"include_usage": True}}
    *chunks, usage = streamed(http, COMPLETIONS, TEXT, echo=True, max_tokens=0, **options)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert usage["usage"]["completion_tokens"] == 0
    assert refused(http, COMPLETIONS, TEXT, max_tokens=0)[0] == "max_tokens"
    assert refused(http, CHAT, SAID, max_tokens=0)[0] == "max_tokens"


def test_a_chat_is_echoed_from_the_assistant_s_last_message(http: httpx.Client) -> None:
    messages = [*SAID["messages"], {"role": "assistant", "content": [{"type": "text", "text": "so far,"}]}]
    plain, echoed = (post(http, CHAT, SAID, messages=messages, echo=echo)["choices"][0] for echo in (False, True))
    assert echoed["message"]["content"] == "so far," + plain["message"]["content"]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(http, CHAT, SAID, messages=messages, echo=True)]
    assert "".join(delta["content"] for delta in deltas) == echoed["message"]["content"]
    assert post(http, CHAT, SAID, echo=True)["choices"] == post(http, CHAT, SAID)["choices"]


def test_what_ended_the_answer(http: httpx.Client, served: Served, asked: Any) -> None:
    url, body = asked
    (eos,) = served.llm.target.eos_token_ids
    usual = post(http, url, body, return_token_ids=True)["choices"][0]
    text = usual["message"]["content"] if url == CHAT else usual["text"]
    for more, reason in (
        ({"stop": [text[2:4]]}, text[2:4]),
        ({"stop_token_ids": usual["token_ids"][2:3]}, usual["token_ids"][2]),
        ({"logit_bias": {str(eos): 100}, "ignore_eos": False}, None),
        ({}, None),
    ):
        assert post(http, url, body, **more)["choices"][0]["stop_reason"] == reason
        *chunks, last = [chunk["choices"][0] for chunk in streamed(http, url, body, **more)]
        assert last["stop_reason"] == reason and not any("stop_reason" in chunk for chunk in chunks)


def test_stop_strings_and_special_tokens_are_shown_on_request(http: httpx.Client, served: Served) -> None:
    usual = post(http, COMPLETIONS, TEXT)["choices"][0]["text"]
    kept = post(http, COMPLETIONS, TEXT, stop=[usual[2:4]], include_stop_str_in_output=True)["choices"][0]["text"]
    assert kept == usual[:4]
    (eos,) = served.llm.target.eos_token_ids
    special = {"logit_bias": {str(eos): 100}, "max_tokens": 2}
    assert post(http, COMPLETIONS, TEXT, **special)["choices"][0]["text"] == ""
    assert post(http, COMPLETIONS, TEXT, **special, skip_special_tokens=False)["choices"][0]["text"] == END * 2
    assert post(http, CHAT, SAID, **special, skip_special_tokens=False)["choices"][0]["message"]["content"] == END * 2


def test_tokens_are_allowed_and_words_are_not(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    made = post(http, url, body, allowed_token_ids=[40, 41], return_token_ids=True)["choices"][0]
    assert {*made["token_ids"]} <= {40, 41}
    body = {**body, "max_tokens": 40}
    usual = post(http, url, body, return_token_ids=True)["choices"][0]["token_ids"]
    texts = {each: post(http, "/detokenize", {"tokens": [each]})["prompt"] for each in usual}
    token, word = next((each, text) for each, text in texts.items() if text.isascii() and text.isalnum())
    without = post(http, url, body, bad_words=[word], return_token_ids=True)["choices"][0]
    assert token in usual and token not in without["token_ids"]
    assert refused(http, url, body, allowed_token_ids=[])[0] == "allowed_token_ids"
    assert refused(http, url, body, bad_words=[""])[0] == "bad_words"


def test_a_prompt_is_cut_and_the_answer_tells_it(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    whole = post(http, url, body, return_token_ids=True)
    made = post(http, url, body, return_token_ids=True, truncate_prompt_tokens=3)
    ids, cut = ((each if url == CHAT else each["choices"][0])["prompt_token_ids"] for each in (whole, made))
    assert (
        cut == ids[-3:] and made["truncated_prompt_tokens"] == len(ids) - 3 and "truncated_prompt_tokens" not in whole
    )
    assert made["usage"]["prompt_tokens"] == 3
    assert all(
        chunk["truncated_prompt_tokens"] == len(ids) - 3
        for chunk in streamed(http, url, body, truncate_prompt_tokens=3)
    )
    assert "truncated_prompt_tokens" not in post(http, url, body, truncate_prompt_tokens=len(ids))
    assert refused(http, url, body, truncate_prompt_tokens=0)[0] == "truncate_prompt_tokens"


def test_a_prompt_beyond_the_context_is_cut_to_what_the_answer_leaves(http: httpx.Client, served: Served) -> None:
    most = served.llm.target.context_length
    made = post(http, COMPLETIONS, TEXT, prompt="a " * 2 * most, truncate_prompt_tokens=-1, max_tokens=6)
    assert made["usage"]["prompt_tokens"] == most - 6 and made["usage"]["completion_tokens"] == 6
    echoed = post(http, COMPLETIONS, TEXT, prompt="one two", truncate_prompt_tokens=1, echo=True, max_tokens=0)
    assert echoed["choices"][0]["text"] != "one two" and "one two".endswith(echoed["choices"][0]["text"])


def test_the_client_names_its_request(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    head = "chatcmpl" if url == CHAT else "cmpl"
    assert post(http, url, body, request_id="mine")["id"] == f"{head}-mine"
    assert {chunk["id"] for chunk in streamed(http, url, body, request_id="mine")} == {f"{head}-mine"}


def test_salted_prompts_share_the_cache_among_themselves(http: httpx.Client, served: Served, asked: Any) -> None:
    """What is kept of a prompt is its tenant's: the salt makes another one of it, which has the key's priorities."""
    url, body = asked

    def made(key: str | None, salt: str | None) -> Any:
        (request,) = served.service.requests(parse_body(url, {**body, "cache_salt": salt}, 4096), key)
        return request

    asks = [(None, None), (None, "a"), (None, "b"), ("key", None), ("key", "a"), ("a", None)]
    tenants = [made(*each).params.tenant for each in asks]
    assert len({*tenants}) == len(asks) and tenants == [made(*each).params.tenant for each in asks]
    assert made("key", "a").scope == made("key", None).scope == "key" and made(None, "a").scope is None
    assert refused(http, url, body, cache_salt="")[0] == "cache_salt"


def test_a_seed_of_minus_one_and_an_empty_model_are_none(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    for model in ("", NAME):
        assert post(http, url, body, seed=-1, model=model)["model"] == NAME
    assert http.post(url, json={**body, "model": "another"}).status_code == 404
    assert refused(http, url, body, seed=-2)[0] == "seed"


def test_no_client_is_told_a_path() -> None:
    llm = fake_llm()
    llm.target.name = "/of/somebody/small.gguf"
    costs = identity(llm.target)
    with serving(llm) as served, httpx.Client(base_url=served.url) as http:
        for model in ("small", "small.gguf", "/of/somebody/small.gguf"):
            assert post(http, "/v1/completions", {"prompt": "a", "max_tokens": 1}, model=model)["model"] == NAME
        said = http.post("/v1/completions", json={"prompt": [10**6], "max_tokens": 1}).json()["error"]["message"]
        assert f"outside the vocabulary of {NAME}," in said
        assert identity(llm.target) == costs


def test_as_openai_has_them(http: httpx.Client, asked: Any) -> None:
    url, body = asked
    assert refused(http, url, body, stream_options={"include_usage": True})[0] == "stream_options"
    assert refused(http, url, body, logit_bias={"5": 101})[0] == "logit_bias"
    assert post(http, url, body, logit_bias={"5": -100, "6": 100})
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert not any("usage" in chunk for chunk in streamed(http, url, body, stream_options=options))
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert all("usage" in chunk for chunk in streamed(http, url, body, stream_options=options))


def test_a_choice_of_tools_needs_tools(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("auto", "required", named):
        assert refused(http, CHAT, SAID, tool_choice=choice)[0] == "tool_choice"
    assert post(http, CHAT, SAID, tool_choice="none") and post(http, CHAT, SAID, tool_choice="auto", tools=[])


@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs"])
def test_a_grammar_may_be_ebnf(http: httpx.Client, field: str) -> None:
    pytest.importorskip("llguidance")
    text = 'root ::= "he" tail\ntail ::= "llo" | "y"'
    more = {field: {"grammar": text} if field == "structured_outputs" else text}
    assert post(http, COMPLETIONS, TEXT, **more, ignore_eos=False, max_tokens=20)["choices"][0]["text"] in (
        "hello",
        "hey",
    )
    more = {field: {"grammar": "root ::= ("} if field == "structured_outputs" else "root ::= ("}
    assert refused(http, COMPLETIONS, TEXT, **more)[0] == field


def test_special_tokens_around_a_prompt(http: httpx.Client) -> None:
    for url, body in ((CHAT, SAID), (COMPLETIONS, TEXT)):
        for special in (True, False):
            made = post(http, url, body, add_special_tokens=special, return_token_ids=True)
            ids = (made if url == CHAT else made["choices"][0])["prompt_token_ids"]
            prompt = {"messages": SAID["messages"]} if url == CHAT else {"prompt": TEXT["prompt"]}
            assert ids == post(http, "/tokenize", prompt, add_special_tokens=special)["tokens"]
