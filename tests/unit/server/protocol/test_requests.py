"""Bodies of requests: every field is honoured, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from doubles import FakeModel
from forerun import LLM, SamplingParams
from forerun.errors import RequestBodyError
from forerun.models.loading.gguf.tokenizer import read_tokenizer
from forerun.server.protocol.bodies import SAME_NAMES
from forerun.server.protocol.model_texts import ModelTexts
from forerun.server.protocol.requests import CHAT_URL, COMPLETIONS_URL, CompletionRequest, parse_body, with_seed
from forerun.server.protocol.without_effect import WITHOUT_EFFECT
from forerun.utils.fields import described
from gguf_metadata import byte_level as of_gguf
from small_tokenizers import byte_level

MESSAGES = [{"role": "user", "content": "hello"}]
CONTEXT = 4096


def chat(**fields: Any) -> CompletionRequest:
    return parse_body(CHAT_URL, {"messages": MESSAGES, **fields}, CONTEXT)


def completion(**fields: Any) -> CompletionRequest:
    return parse_body(COMPLETIONS_URL, {"prompt": "hello", **fields}, CONTEXT)


SAME: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "n": 3,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "min_tokens": 2,
    "ignore_eos": True,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "6": 1.5},
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "allowed_token_ids": [3, 5],
    "bad_words": ["a"],
}


@pytest.mark.parametrize("name", SAME)
def test_a_sampling_option_is_honoured_by_both(name: str) -> None:
    for params in (chat(**{name: SAME[name]}).params, completion(**{name: SAME[name]}).params):
        expected = getattr(SamplingParams(max_tokens=CONTEXT, **{name: SAME[name]}), name)
        assert getattr(params, name) == expected != getattr(SamplingParams(), name)


def test_no_option_is_forgotten() -> None:
    """Whoever adds a sampling option decides here how a body gives it, if at all: none is a client's unnoticed."""
    otherwise = ["max_tokens", "logprobs", "prompt_logprobs", "prediction", "grammar", "drafter", "num_draft_tokens"]
    servers = ["tenant"]
    assert sorted([*SAME_NAMES, *otherwise, *servers]) == sorted(described(SamplingParams))
    assert {*SAME_NAMES} == {*SAME, "priority"}


def test_an_option_that_nobody_listed_is_refused() -> None:
    for name in ("tenant", "detokenize", "drafter", "grammar"):
        with pytest.raises(RequestBodyError, match=f"^{name} is not supported"):
            chat(**{name: "a"})


def test_what_the_defaults_are() -> None:
    assert chat().params == SamplingParams(max_tokens=CONTEXT)
    assert completion().params == SamplingParams(max_tokens=16)
    assert chat() == CompletionRequest(CHAT_URL, None, [MESSAGES], chat().params)


def test_null_is_left_out() -> None:
    nulls = dict.fromkeys([*SAME, *WITHOUT_EFFECT, "max_tokens", "stream", "stream_options", "model"])
    assert chat(**nulls) == chat() and completion(**nulls) == completion()


def test_how_long_a_chat_may_be() -> None:
    assert chat(max_tokens=5).params.max_tokens == chat(max_completion_tokens=5).params.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).params.max_tokens == 5
    with pytest.raises(RequestBodyError, match="differ") as caught:
        chat(max_tokens=5, max_completion_tokens=6)
    assert caught.value.param == "max_completion_tokens"


def test_log_probabilities() -> None:
    assert chat(logprobs=False).params.logprobs is None
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).params.logprobs == 4
    assert completion(logprobs=3).params.logprobs == 3
    assert completion(logprobs=3).params.prompt_logprobs is None
    echoed = completion(logprobs=0, echo=True)
    assert echoed.params.logprobs == echoed.params.prompt_logprobs == 0 and echoed.echo


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("echo", [True, False])
def test_log_probabilities_of_a_completion_are_a_number(value: bool, echo: bool) -> None:
    """A chat's true or false, which Python takes for 1 or 0, is refused, with what the number would mean."""
    with pytest.raises(RequestBodyError, match="how many of the most probable tokens") as caught:
        completion(logprobs=value, echo=echo)
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hello", ["hello"]),
        (["hello", "a"], ["hello", "a"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [None, [], 5, [[]] * 0, ["a", 1], [1.5], [[1], "a"], {"a": 1}, [True]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(RequestBodyError, match="prompt is") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


def test_predictions() -> None:
    assert chat(prediction={"type": "content", "content": "abc"}).params.prediction == "abc"
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert chat(prediction={"type": "content", "content": parts}).params.prediction == "abc"
    for wrong in ("abc", {"content": "abc"}, {"type": "content"}, {"type": "content", "content": [5]}):
        with pytest.raises(RequestBodyError) as caught:
            chat(prediction=wrong)
        assert caught.value.param == "prediction"


def test_streams() -> None:
    assert not chat().stream and chat(stream=True).stream
    assert not chat(stream=True).stream_options.include_usage
    assert chat(stream=True, stream_options={"include_usage": True}).stream_options.include_usage
    for fields in (
        {"stream_options": {"include_drafts": True}},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": True, "stream_options": 5},
    ):
        with pytest.raises(RequestBodyError) as caught:
            completion(**fields)
        assert caught.value.param == "stream_options"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"add_generation_prompt": True, "continue_final_message": False},
        {"top_logprobs": 0, "logprobs": False},
    ],
    ids=str,
)
def test_what_clients_send_by_habit(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


FIELDS = {name: field for name, field in WITHOUT_EFFECT.items() if "." not in name}
"""Those of bodies themselves: others are tested where their objects are read."""


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.values is None])
def test_what_changes_nothing_is_taken_and_told(name: str) -> None:
    told = (name,) if FIELDS[name].is_told else ()
    assert completion(**{name: {"x": 1}}) == replace(completion(), ignored=told)
    value: Any = True if name == "parallel_tool_calls" else ["x"]  # which chats read
    assert chat(**{name: value}) == replace(chat(), ignored=told)


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.values is not None])
def test_fields_that_ask_for_nothing(name: str) -> None:
    more = {"stream": True} if name == "stream_options" else {}
    for value in FIELDS[name].values or ():
        assert replace(chat(**{name: value, **more}), ignored=()) == chat(**more)
    with pytest.raises(RequestBodyError, match=rf"{name}(\.\w+)? is (not supported|an object, but must be)") as caught:
        chat(**{name: {"type": "json_object"}, **more})
    assert caught.value.param == name and FIELDS[name].reason


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tempreature": 1}, "tempreature", "Did you mean 'temperature'"),
        ({"n_predict": 1}, "n_predict", "Did you mean 'max_tokens'"),
        ({"stop_sequences": ["a"]}, "stop_sequences", "Did you mean 'stop'"),
        ({"xyzzy": 1}, "xyzzy", "ignored. Leave it out"),
        ({"lora_request": 1}, "lora_request", "ignored. Leave it out"),
        ({"best_of": 2}, "best_of", "equal to n"),
        ({"temperature": "0.5"}, "temperature", "must be a number"),
        ({"temperature": -1}, "temperature", "0..100"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"n": 0}, "n", "1..128"),
        ({"n": 1.5}, "n", "whole number"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": "5"}, "max_tokens", "whole number"),
        ({"stop": 5}, "stop", "a string or a list"),
        ({"stop": ["a", ""]}, "stop", "non-empty"),
        ({"stop": [5]}, "stop", "non-empty string"),
        ({"logit_bias": [5]}, "logit_bias", "must map"),
        ({"logit_bias": {"a": 5}}, "logit_bias", "token id"),
        ({"logprobs": 21}, "logprobs", "0..20"),
        ({"logprobs": True}, "logprobs", "whole number"),
        ({"echo": "yes"}, "echo", "true or false"),
        ({"stream": 1}, "stream", "true or false"),
        ({"model": 5}, "model", "a string"),
        ({"min_tokens": 20}, "min_tokens", "above max_tokens"),
        ({"temperature": 0, "n": 2}, "n", "would be the same"),
        ({"messages": MESSAGES}, "messages", "not supported"),
    ],
)
def test_what_a_completion_is_refused_for(fields: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(RequestBodyError, match=words) as caught:
        completion(**fields)
    assert caught.value.param == param and caught.value.status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hello"]}, "messages"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"tenant": "x"}, "tenant"),
    ],
)
def test_what_a_chat_is_refused_for(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestBodyError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_what_is_no_body(body: Any) -> None:
    with pytest.raises(RequestBodyError, match="not a JSON object"):
        parse_body(CHAT_URL, body, CONTEXT)


def test_messages_hold_nothing_of_a_prompt() -> None:
    for body in ({"prompt": {"secret": 1}}, {"prompt": "secret", "model": ["secret"]}):
        with pytest.raises(RequestBodyError) as caught:
            parse_body(COMPLETIONS_URL, body, CONTEXT)
        assert "secret" not in str(caught.value)


def ids(request: CompletionRequest, tokenizer: Any) -> list[list[int]]:
    fake: Any = FakeModel(vocab_size=300 if tokenizer is None else len(tokenizer))
    return [
        each.prompt_token_ids for each in request.requests(LLM(fake, None, tokenizer=tokenizer), ModelTexts(tokenizer))
    ]


def test_prompts_in_tokens() -> None:
    tokenizer = byte_level()
    assert ids(completion(prompt=["hello", "a"]), tokenizer) == [
        tokenizer(text)["input_ids"] for text in ("hello", "a")
    ]
    assert ids(completion(prompt=[5, 6]), None) == [[5, 6]]
    with pytest.raises(RequestBodyError, match="no tokenizer") as caught:
        ids(completion(), None)
    assert caught.value.param == "prompt"
    with pytest.raises(RequestBodyError, match="no chat template") as caught:
        ids(chat(), tokenizer)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("make", [byte_level, lambda: read_tokenizer(of_gguf(), "m.gguf")])
def test_options_of_a_chat_template(make: Callable[[], Any]) -> None:
    tokenizer = make()
    tokenizer.chat_template = {"default": "{{ messages[0].content }}{% if think %}!{% endif %}"}
    plain, thinking = chat(), chat(chat_template_kwargs={"think": True})
    assert ids(thinking, tokenizer) == [tokenizer("hello!")["input_ids"]] != ids(plain, tokenizer)
    opened = chat(messages=[{"role": "assistant", "content": "hello"}], continue_final_message=True)
    assert ids(opened, tokenizer) == ids(plain, tokenizer)
    for name in set(signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"self"}:
        for value in (True, [1]):
            with pytest.raises(RequestBodyError, match=f"'{name}'") as caught:
                ids(chat(chat_template_kwargs={name: value}), tokenizer)
            assert caught.value.param == "chat_template_kwargs"


def test_an_effort_is_for_templates_that_read_it() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ messages[0].content }}{{ reasoning_effort }}"
    assert ids(chat(reasoning_effort="a"), tokenizer) == [tokenizer("helloa")["input_ids"]]
    assert chat(reasoning_effort="a").unread_by(tokenizer) == chat().unread_by(None) == []
    tokenizer.chat_template = "{{ messages[0].content }}"
    unread = chat(reasoning_effort="low")
    assert ids(unread, tokenizer) == ids(chat(), tokenizer) and unread.unread_by(tokenizer) == ["reasoning_effort"]


def test_a_seed_for_those_that_have_none() -> None:
    assert with_seed(completion(), 5).params.seed == 5
    assert with_seed(completion(seed=3), 5).params.seed == 3
