"""/v1/responses through OpenAI's own client: text in, text out, nothing kept."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from forerun import SamplingParams
from serving import NAME, Served

URL = "/v1/responses"
CHAT: Any = [{"role": "system", "content": "a"}, {"role": "user", "content": "hello"}]


def twin(served: Served, **options: Any) -> Any:
    return served.llm.generate(CHAT, SamplingParams(max_tokens=12, **options))


INPUTS: list[dict[str, Any]] = [
    {"instructions": "a", "input": "hello"},
    {"input": [{"role": "developer", "content": "a"}, {"role": "user", "content": "hello"}]},
    {
        "instructions": "a",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
    },
]


@pytest.mark.parametrize("given", INPUTS, ids=str)
def test_an_answer(served: Served, client: openai.OpenAI, given: dict[str, Any]) -> None:
    answer = client.responses.create(
        model=NAME, max_output_tokens=12, extra_body={"seed": 3}, temperature=0.9, metadata={"a": "b"}, **given
    )
    expected = twin(served, seed=3, temperature=0.9)
    assert answer.output_text == expected.text and answer.status == "incomplete"
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None and answer.usage.output_tokens == 12 and answer.metadata == {"a": "b"}
    assert answer.temperature == 0.9 and answer.max_output_tokens == 12 and answer.store is False  # type: ignore[attr-defined]


def test_the_events_of_a_stream(served: Served, client: openai.OpenAI) -> None:
    expected = twin(served, temperature=0)
    with client.responses.stream(
        model=NAME, max_output_tokens=12, temperature=0, instructions="a", input="hello"
    ) as stream:
        events = list(stream)
        final = None
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.output_text == expected.text and final is None


def test_an_answer_that_ends_by_itself(client: openai.OpenAI) -> None:
    """The stop string is no field of OpenAI's here; its client sends it as an extra one."""
    extra = {"seed": 5, "stop_token_ids": list(range(100))}
    with client.responses.stream(model=NAME, input="hello", extra_body=extra) as stream:
        final = stream.get_final_response()
    assert (
        final.status == "completed"
        and final.output_text == client.responses.create(model=NAME, input="hello", extra_body=extra).output_text
    )


def test_logprobs(served: Served, client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=NAME,
        input="hello",
        instructions="a",
        max_output_tokens=12,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    part: Any = answer.output[0].content[0]  # type: ignore[union-attr]
    expected = twin(served, temperature=0, logprobs=2).logprobs
    assert [entry.logprob for entry in part.logprobs] == [entry.logprob for entry in expected]


REFUSED: dict[str, dict[str, Any]] = {
    "input": {},
    "previous_response_id": {"previous_response_id": "resp_1"},
    "tools": {"tools": [{"type": "web_search"}]},
    "text": {"text": {"format": {"type": "xml"}}},
    "background": {"background": True},
    "reasoning": {"reasoning": {"budget": 3}},
    "reasoning_effort": {"reasoning": {"effort": "low"}},
    "truncation": {"truncation": "auto"},
    "conversation": {"conversation": "conv_1"},
    "include": {"include": ["file_search_call.results"]},
    "top_logprobs": {"top_logprobs": 2},
    "n": {"n": 2},
    "max_output_tokens": {"max_output_tokens": 0},
}


@pytest.mark.parametrize(("param", "fields"), REFUSED.items(), ids=REFUSED.keys())
def test_what_is_refused(http: httpx.Client, param: str, fields: dict[str, Any]) -> None:
    body = fields if param == "input" else {"input": "hello", **fields}
    response = http.post(URL, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


ITEMS: list[Any] = [
    7,
    [],
    [7],
    [{"role": "user"}],
    [{"role": "critic", "content": "a"}],
    [{"type": "function_call_output", "call_id": "1", "output": "a"}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
]


@pytest.mark.parametrize("given", ITEMS, ids=str)
def test_input_that_is_no_text(http: httpx.Client, given: Any) -> None:
    response = http.post(URL, json={"input": given})
    assert response.status_code == 400 and response.json()["error"]["param"] == "input"


def test_a_failure_in_a_stream(served: Served, http: httpx.Client) -> None:
    count = 0

    def fail(_: Any) -> None:
        nonlocal count
        count += 1
        if count > 4:
            raise RuntimeError("secret")

    model: Any = served.llm.target
    model.before_forward = fail
    try:
        told = http.post(URL, json={"input": "hello", "stream": True, "temperature": 0}).text
    finally:
        model.before_forward = lambda _: None
    assert told.rstrip().rpartition("event: ")[2].startswith("error\n") and "secret" not in told


@pytest.mark.parametrize("stream", ["false", "true"])
@pytest.mark.parametrize(
    "field",
    ['"user": [Infinity]', '"metadata": {"a": NaN}'],
)
def test_what_the_answer_cannot_repeat_is_refused(served: Served, field: str, stream: str) -> None:
    content = f'{{"input": "hello", "max_output_tokens": 2, "stream": {stream}, {field}}}'
    refused = httpx.post(served.url + URL, content=content, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field.split('"')[1]


def test_the_models_own_sampling_is_the_default(
    served: Served, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.llm.target, "recommended_sampling", {"temperature": 0.0, "top_p": 0.9})
    bodies: list[dict[str, Any]] = [{}, {"temperature": 0.5}, {"temperature": None}]
    answers = [
        http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 2, **each}).json() for each in bodies
    ]
    assert [(each["temperature"], each["top_p"]) for each in answers] == [(0.0, 0.9), (0.5, 0.9), (0.0, 0.9)]
