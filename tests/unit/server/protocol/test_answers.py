"""Results as bodies of responses, and exceptions as error bodies."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM, DrafterError, EngineClosedError, Generation, PromptError, SamplingError
from forerun.engine.results import SourceStats
from forerun.errors import QueueFullError, RequestBodyError
from forerun.sampling import TokenLogprob
from forerun.server.protocol.answers import (
    Asked,
    Chunks,
    TokenPieces,
    completion_logprobs,
    prompt_starts,
    usage,
)
from forerun.server.protocol.errors import error_response
from forerun.server.protocol.model_texts import ModelTexts, TokenNames
from forerun.server.protocol.requests import CHAT_URL, COMPLETIONS_URL, CompletionRequest, parse_body
from small_tokenizers import END, byte_level, ids_of

TOKENIZER = byte_level()
TOKENIZER.chat_template = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    fake: Any = FakeModel(vocab_size=len(TOKENIZER), eos_token_ids=ids_of(TOKENIZER, END))
    return LLM(fake, None, tokenizer=TOKENIZER)


def answer(llm: LLM, url: str, **fields: Any) -> tuple[CompletionRequest, list[Generation], dict[str, Any]]:
    request = parse_body(url, fields, llm.target.context_length)
    prompts = [each.prompt_token_ids for each in request.requests(llm, ModelTexts(llm.tokenizer))]
    generations = [llm.generate([prompt], request.params)[0] for prompt in prompts]
    body = Chunks(Asked(ModelTexts(llm.tokenizer), request, prompts, "it", "7", created=3)).whole(generations)
    json.dumps(body, allow_nan=False)
    return request, generations, body


def test_a_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    fields = {"messages": messages, "max_tokens": 6, "seed": 2, "n": 2, "logprobs": True, "top_logprobs": 2}
    _, [generation], body = answer(llm, CHAT_URL, **fields)
    names = TokenNames(TOKENIZER)
    assert {key: body[key] for key in ("id", "object", "created", "model")} == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 3,
        "model": "it",
    }
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for made, choice in zip(body["choices"], generation.choices):
        assert made["message"] == {"role": "assistant", "content": choice.text, "refusal": None}
        assert made["finish_reason"] == choice.finish_reason
        content = made["logprobs"]["content"]
        assert choice.logprobs is not None and len(content) == len(choice.token_ids)
        for entry, token_id, logprob in zip(content, choice.token_ids, choice.logprobs):
            assert entry["token"] == names.text(token_id) and entry["bytes"] == list(names.data(token_id))
            assert entry["logprob"] == logprob.logprob
            assert [other["token"] for other in entry["top_logprobs"]] == [names.text(at) for at, _ in logprob.top]
    num_prompt, num_output = len(generation.prompt_token_ids), sum(len(c.token_ids) for c in generation.choices)
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_completions_of_several_prompts(llm: LLM) -> None:
    fields = {"prompt": ["hello", "world a"], "n": 2, "seed": 1, "max_tokens": 5}
    _, generations, body = answer(llm, COMPLETIONS_URL, **fields)
    assert body["id"] == "cmpl-7" and body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    texts = [choice.text for generation in generations for choice in generation.choices]
    assert [choice["text"] for choice in body["choices"]] == texts
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in generations)
    assert body["usage"]["completion_tokens"] == sum(len(c.token_ids) for each in generations for c in each.choices)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_echo_with_log_probabilities(llm: LLM, as_tokens: bool) -> None:
    """What lm-eval reads: one entry per token of prompt and answer, the first without a probability."""
    ids = TOKENIZER("hello world a")["input_ids"]
    fields = {"prompt": ids if as_tokens else "hello world a", "echo": True, "logprobs": 2, "max_tokens": 3, "seed": 4}
    _, [generation], body = answer(llm, COMPLETIONS_URL, **fields)
    [choice] = body["choices"]
    assert choice["text"] == "hello world a" + generation.text
    found = choice["logprobs"]
    token_ids = [*ids, *generation.token_ids]
    assert found["tokens"] == [TokenNames(TOKENIZER).text(token_id) for token_id in token_ids]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert generation.prompt_logprobs is not None and generation.logprobs is not None
    reports = [*generation.prompt_logprobs[1:], *generation.logprobs]
    assert found["token_logprobs"][1:] == [report.logprob for report in reports if report]
    for name, top, logprob in zip(found["tokens"][1:], found["top_logprobs"][1:], found["token_logprobs"][1:]):
        assert top[name] == logprob and len(top) in (2, 3)
    for token_id, at in zip(ids, found["text_offset"]):
        assert choice["text"][at:].startswith(TokenNames(TOKENIZER).text(token_id))


@pytest.mark.parametrize("as_tokens", [False, True])
def test_offsets_count_the_special_tokens_that_the_text_has(llm: LLM, as_tokens: bool) -> None:
    text = f"hello{END} world{END}"
    ids = TOKENIZER(text)["input_ids"]
    fields = {"prompt": ids if as_tokens else text, "echo": True, "logprobs": 0, "max_tokens": 3, "seed": 4}
    _, [generation], body = answer(llm, COMPLETIONS_URL, **fields)
    [choice] = body["choices"]
    assert choice["text"] == text + generation.text
    offsets = choice["logprobs"]["text_offset"]
    for token_id, at in zip(ids, offsets):
        assert choice["text"][at:].startswith(TokenNames(TOKENIZER).text(token_id))
    assert offsets[len(ids)] == len(text)


def test_offsets_are_without_special_tokens_that_the_text_lacks() -> None:
    """A token that the tokenizer puts before a text has no characters of it."""
    ids = ids_of(TOKENIZER, END, "a", "Ġworld")
    assert prompt_starts(ids, "a world", ModelTexts(TOKENIZER)) == [0, 0, 1]
    assert prompt_starts(ids, f"{END}a world", ModelTexts(TOKENIZER)) == [0, len(END), len(END) + 1]


def test_no_echo_begins_with_the_answer(llm: LLM) -> None:
    fields = {"prompt": "hello", "logprobs": 0, "max_tokens": 4, "seed": 4}
    _, [generation], body = answer(llm, COMPLETIONS_URL, **fields)
    [choice] = body["choices"]
    assert choice["text"] == generation.text
    assert choice["logprobs"]["text_offset"][0] == 0 and len(choice["logprobs"]["tokens"]) == 4
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])


def test_tokens_by_name() -> None:
    names = TokenNames(TOKENIZER)
    half, end, word = ids_of(TOKENIZER, "Ġâ\u0124", END, "Ġworld")
    assert names.text(word) == " world"
    assert names.text(half) == "bytes:\\x20\\xe2\\x82"
    assert names.text(end) == END
    assert TokenNames(None).text(5) == "token_id:5"


def test_offsets_within_a_character_and_after_the_end() -> None:
    from forerun.engine.text import TokenTexts

    ids = [*TOKENIZER("a€a")["input_ids"]]
    texts = TokenTexts(TOKENIZER)
    assert TokenPieces([], texts).push(ids)[0] == [0, 1, 1, 1, 2]
    assert TokenPieces([], None).push(ids)[0] == [0] * 5


def test_numbers_that_json_does_not_have() -> None:
    entry = TokenLogprob(1, -math.inf, ((2, -0.5), (3, -math.inf)))
    found = completion_logprobs([1], [entry], [0], TokenNames(None))
    assert found["token_logprobs"] == [-9999.0]
    assert found["top_logprobs"] == [{"token_id:2": -0.5, "token_id:3": -9999.0, "token_id:1": -9999.0}]


def test_the_usage_of_what_was_cached_and_predicted(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    request = parse_body(CHAT_URL, {"messages": messages, "prediction": {"type": "content", "content": "a"}}, 99)
    [generation] = [llm.generate([[1, 2, 3]], parse_body(COMPLETIONS_URL, {"prompt": "a"}, 99).params)[0]]
    generation.stats.num_cached_tokens = 2
    generation.stats.sources["prediction"] = SourceStats(7, 5)
    found = usage(request, [generation], details=True)
    assert found["prompt_tokens_details"] == {"cached_tokens": 2}
    assert found["completion_tokens_details"] == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    assert set(usage(request, [generation], details=False)) == {"prompt_tokens", "completion_tokens", "total_tokens"}


@pytest.mark.parametrize(
    ("error", "status", "kind", "param"),
    [
        (RequestBodyError("bad", param="top_p"), 400, "invalid_request_error", "top_p"),
        (RequestBodyError("bad", "model", "model_not_found", 404), 404, "invalid_request_error", "model"),
        (PromptError("bad"), 400, "invalid_request_error", None),
        (SamplingError("bad"), 400, "invalid_request_error", None),
        (QueueFullError("bad"), 429, "rate_limit_error", None),
        (EngineClosedError("bad"), 503, "server_error", None),
        (DrafterError("bad"), 500, "server_error", None),
    ],
)
def test_errors(error: Exception, status: int, kind: str, param: str | None) -> None:
    found = error_response(error)
    code = getattr(error, "code", None)
    assert found == (status, {"error": {"message": "bad", "type": kind, "param": param, "code": code}})


def test_an_error_that_is_not_ours_is_named_by_its_type() -> None:
    status, body = error_response(KeyError("what the request held"))
    assert status == 500 and "KeyError" in body["error"]["message"] and "held" not in body["error"]["message"]
