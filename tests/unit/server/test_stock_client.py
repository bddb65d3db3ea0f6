"""Every field through OpenAI's own client, streaming and not: the text is that of the offline twin."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from forerun import Generation, SamplingParams
from serving import NAME, Served

MESSAGES: Any = [{"role": "system", "content": "a"}, {"role": "user", "content": "hello world"}]
PROMPTS: list[Any] = ["hello", "a world"]
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 7},
    "choices": {"seed": 7, "n": 3},
    "filters": {"seed": 3, "temperature": 0.8, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01}},
    "penalties": {
        "seed": 4,
        "presence_penalty": 0.5,
        "frequency_penalty": 1.5,
        "extra_body": {"repetition_penalty": 1.3},
    },
    "bias": {"temperature": 0, "logit_bias": {"40": 100}},
    "stop": {"seed": 9, "stop": ["a", "l"]},
    "stop ids": {"seed": 9, "extra_body": {"stop_token_ids": [40, 41, 42, 43], "ignore_eos": True, "min_tokens": 3}},
    "labels": {"temperature": 0, "user": "somebody", "extra_body": {"metadata": {"a": "b"}, "priority": 2}},
}


def params(fields: dict[str, Any], **more: Any) -> SamplingParams:
    """The same options offline."""
    extra = {key: value for key, value in fields.get("extra_body", {}).items() if key != "metadata"}
    plain = {key: value for key, value in fields.items() if key not in ("extra_body", "user")}
    return SamplingParams(**plain, **extra, **more)


def chat_prompt(served: Served) -> list[int]:
    return served.llm.encode(MESSAGES)


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_a_chat(served: Served, client: openai.OpenAI, fields: dict[str, Any]) -> None:
    twin = served.llm.generate(chat_prompt(served), params(fields, max_tokens=14))
    request: Any = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 14, **fields}
    answer = client.chat.completions.create(**request)
    assert [choice.message.content for choice in answer.choices] == [choice.text for choice in twin.choices]
    assert [choice.finish_reason for choice in answer.choices] == [choice.finish_reason for choice in twin.choices]
    assert answer.object == "chat.completion" and answer.model == NAME and answer.choices[0].message.role == "assistant"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(twin.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in twin.choices)
    chunks = list(client.chat.completions.create(stream=True, **request))
    assert chunks[0].choices[0].delta.role == "assistant" and all(chunk.usage is None for chunk in chunks)
    texts, reasons = joined(chunks, len(twin.choices), lambda choice: choice.delta.content or "")
    assert texts == [choice.text for choice in twin.choices]
    assert reasons == [choice.finish_reason for choice in twin.choices]


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_completions_of_several_prompts(served: Served, client: openai.OpenAI, fields: dict[str, Any]) -> None:
    twins = [served.llm.generate(prompt, params(fields, max_tokens=9)) for prompt in PROMPTS]
    request: Any = {"model": NAME, "prompt": PROMPTS, "max_tokens": 9, **fields}
    expected = [choice.text for twin in twins for choice in twin.choices]
    answer = client.completions.create(**request)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    chunks = list(client.completions.create(stream=True, **request))
    texts, reasons = joined(chunks, len(expected), lambda choice: choice.text)
    assert texts == expected
    assert reasons == [choice.finish_reason for twin in twins for choice in twin.choices]


def joined(chunks: list[Any], count: int, text: Any) -> tuple[list[str], list[Any]]:
    """By choice: the text of a stream, and why it ended, which is said once."""
    texts, reasons = [""] * count, [None] * count
    for chunk in chunks:
        assert chunk.choices or chunk is chunks[-1]
        for choice in chunk.choices:
            assert reasons[choice.index] is None
            texts[choice.index] += text(choice)
            reasons[choice.index] = choice.finish_reason
    return texts, reasons


@pytest.mark.parametrize("prompt", ["hello", [71, 68, 75], ["hello", "world"], [[71, 68], [75, 75, 78]]], ids=str)
def test_the_forms_of_prompts(served: Served, client: openai.OpenAI, prompt: Any) -> None:
    single = isinstance(prompt, str) or isinstance(prompt[0], int)
    every: list[Any] = [prompt] if single else prompt
    expected = [served.llm.generate(each, SamplingParams(temperature=0, max_tokens=16)).text for each in every]
    answer = client.completions.create(model=NAME, prompt=prompt, temperature=0)
    assert [choice.text for choice in answer.choices] == expected


def test_logprobs_of_a_chat(served: Served, client: openai.OpenAI) -> None:
    twin = served.llm.generate(chat_prompt(served), SamplingParams(seed=5, max_tokens=10, logprobs=3))
    request: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 10, "seed": 5, "logprobs": True}
    answer = client.chat.completions.create(**request, top_logprobs=3)
    reported = answer.choices[0].logprobs
    assert reported is not None and reported.content is not None and twin.logprobs is not None
    assert [entry.logprob for entry in reported.content] == [entry.logprob for entry in twin.logprobs]
    assert all(len(entry.top_logprobs) >= 3 for entry in reported.content)
    streamed: list[Any] = []
    for chunk in client.chat.completions.create(stream=True, top_logprobs=3, **request):
        streamed += (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    assert streamed == reported.content
    alone = client.chat.completions.create(**request).choices[0].logprobs
    assert alone is not None and alone.content is not None and all(not entry.top_logprobs for entry in alone.content)


def test_echo_and_logprobs_of_the_prompt(served: Served, client: openai.OpenAI) -> None:
    """As lm_eval asks: lists of token ids, echo, logprobs, one token."""
    prompts = [[71, 68, 75, 75, 78], [86, 78]]
    answer = client.completions.create(model=NAME, prompt=prompts, echo=True, logprobs=1, max_tokens=1, temperature=0)
    for prompt, choice in zip(prompts, answer.choices):
        twin: Generation = served.llm.generate(
            prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1)
        )
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert twin.prompt_logprobs is not None and twin.logprobs is not None
        expected = [entry and entry.logprob for entry in [*twin.prompt_logprobs, *twin.logprobs]]
        assert choice.logprobs.token_logprobs == expected and expected[0] is None
        assert choice.logprobs.tokens is not None and len(choice.logprobs.tokens) == len(prompt) + 1
        assert choice.text == "".join(choice.logprobs.tokens[:-1]) + twin.text
    streamed = list(client.completions.create(model=NAME, prompt="hello", echo=True, max_tokens=4, seed=1, stream=True))
    whole = client.completions.create(model=NAME, prompt="hello", echo=True, max_tokens=4, seed=1)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert whole.choices[0].text.startswith("hello")


def test_logprobs_of_a_streamed_completion(client: openai.OpenAI) -> None:
    request: Any = {"model": NAME, "prompt": "hello", "max_tokens": 12, "seed": 2, "logprobs": 2}
    whole = client.completions.create(**request).choices[0].logprobs
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [
            getattr(chunk.choices[0].logprobs, name)
            for chunk in client.completions.create(stream=True, **request)
            if chunk.choices[0].logprobs is not None
        ]
        assert len(parts) > 1 and [each for part in parts for each in part] == getattr(whole, name)


def test_usage_in_every_chunk(client: openai.OpenAI) -> None:
    request: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 9, "temperature": 0}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    found = [each.usage for each in client.chat.completions.create(stream=True, stream_options=options, **request)]
    counts = [usage.completion_tokens for usage in found if usage is not None]
    assert counts == sorted(counts) and counts[0] == 0 and counts[-2:] == [counts[-1]] * 2
    assert len(counts) == len(found) and len({usage.prompt_tokens for usage in found if usage is not None}) == 1


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    request: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 6, "seed": 2}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request))
    assert all(chunk.usage is None for chunk in chunks[:-1]) and not chunks[-1].choices
    last, usage = chunks[-1].usage, whole.usage
    assert last is not None and usage is not None
    assert (last.prompt_tokens, last.completion_tokens, last.total_tokens) == (
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
    )


def test_what_speculation_gave(served: Served, client: openai.OpenAI) -> None:
    request: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    twin = served.llm.generate(chat_prompt(served), SamplingParams(temperature=0, max_tokens=20)).stats
    chunks = list(client.chat.completions.create(stream=True, **request))
    for told in (client.chat.completions.create(**request), chunks[-1]):
        figures = told.metrics["speculative_decoding"]  # type: ignore[union-attr, attr-defined]
        assert figures["num_draft_tokens"] > 0 and figures["num_forwards"] == twin.num_tokens - twin.num_accepted_tokens
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
        weighted = sum(place * count for place, count in enumerate(figures["acceptance_histogram"]))
        assert weighted == figures["num_accepted_draft_tokens"]
    assert [hasattr(chunk, "metrics") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_models_and_a_wrong_one(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="another", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_template_options(client: openai.OpenAI) -> None:
    def tokens(**extra: Any) -> int:
        usage = client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=1, temperature=0, extra_body=extra
        ).usage
        assert usage is not None
        return usage.prompt_tokens

    assert tokens(chat_template_kwargs={"mood": "!!!"}) == tokens() + 3


@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_of_the_form_that_is_asked_for(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages: Any = [{"role": "user", "content": "a"}]
    asked: dict[str, Any] = {
        "messages": messages,
        "response_format": form,
        "temperature": 1,
        "seed": 3,
        "max_tokens": 60,
    }
    if stream:
        chunks = client.chat.completions.create(model=NAME, stream=True, **asked)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    else:
        text = client.chat.completions.create(model=NAME, **asked).choices[0].message.content or ""
    assert set(json.loads(text)) == {"a"}
