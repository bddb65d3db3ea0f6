"""/v1/responses through OpenAI's own client: text in, text out, and what is kept of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from clients.tools_model import write
from forerun import LLM, SamplingParams
from forerun.errors import RequestBodyError
from forerun.kernels.cpu.page_layout import PAGE
from forerun.server.kept_responses import KeptResponses
from forerun.server.protocol.bodies import validated
from forerun.server.protocol.responses_api import ResponseBody
from serving import LIMIT, NAME, Served, failing_forwards, fake_llm, serving

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
    assert answer.temperature == 0.9 and answer.max_output_tokens == 12 and answer.store is True  # type: ignore[attr-defined]


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
    "previous_response_id": {"previous_response_id": 1},
    "store": {"store": "yes"},
    "tools": {"tools": [{"type": "web"}]},
    "tool_choice": {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
    "text": {"text": {"format": {"type": "xml"}}},
    "background": {"background": True},
    "reasoning": {"reasoning": {"budget": 3}},
    "truncation": {"truncation": "middle"},
    "conversation": {"conversation": "conv_1"},
    "include": {"include": ["file_search_call"]},
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
    with failing_forwards(served.llm):
        told = http.post(URL, json={"input": "hello", "stream": True, "temperature": 0}).text
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


TURN: dict[str, Any] = {"model": NAME, "max_output_tokens": 100, "temperature": 0}


def twin_of(served: Served, *said: str) -> Any:
    """The answer to a chat of user and assistant in turns."""
    roles = ["user", "assistant"] * len(said)
    chat: Any = [{"role": role, "content": text} for role, text in zip(roles, said)]
    return served.llm.generate(chat, SamplingParams(max_tokens=100, temperature=0))


def test_a_conversation_goes_on_from_what_is_kept(served: Served, client: openai.OpenAI) -> None:
    """Instructions are of one turn alone."""
    first = client.responses.create(**TURN, input="hello " * 40)
    second = client.responses.create(**TURN, input="and", previous_response_id=first.id, instructions="a")
    with client.responses.stream(**TURN, input="then", previous_response_id=second.id) as stream:
        events = list(stream)
    third: Any = next(each.response for each in events if each.type in ("response.completed", "response.incomplete"))
    fourth = client.responses.create(**TURN, input="so", previous_response_id=third.id, store=False)
    said = ["hello " * 40, first.output_text, "and", second.output_text, "then", third.output_text, "so"]
    assert fourth.output_text == twin_of(served, *said).text
    assert third.previous_response_id == second.id and first.previous_response_id is None
    assert (third.store, fourth.store) == (True, False)  # type: ignore[attr-defined]
    for gone in (fourth.id, "resp_1"):
        with pytest.raises(openai.NotFoundError) as refused:
            client.responses.create(**TURN, input="a", previous_response_id=gone)
        assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"


def test_a_turn_computes_what_is_new(tmp_path: Path) -> None:
    """And what does not fill a page of the cache. The model's tokens are bytes, which come back as they were."""
    write(tmp_path)
    with (
        serving(LLM(str(tmp_path), dtype="float32")) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=LIMIT) as client,
    ):
        name, seen = None, 0
        for text in ("def add(a, b):\n    return a + b\n" * 20, "x = 1", "y = 2"):
            answer = client.responses.create(**TURN, input=text, previous_response_id=name)
            assert answer.usage is not None
            new = answer.usage.input_tokens - seen
            computed = answer.usage.input_tokens - answer.usage.input_tokens_details.cached_tokens
            assert new > 0 and computed < new + PAGE
            name, seen = answer.id, answer.usage.total_tokens


def test_a_kept_response_is_read_listed_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(**TURN, input="hello", instructions="a", metadata={"b": "c"})
    second = client.responses.create(**TURN, input=[{"role": "user", "content": "and"}], previous_response_id=first.id)
    assert client.responses.retrieve(first.id) == first and client.responses.retrieve(second.id) == second
    items: Any = [*client.responses.input_items.list(second.id, order="asc", limit=1)]
    assert [each.content[0].text for each in items] == ["hello", first.output_text, "and"]
    assert [*client.responses.input_items.list(second.id, limit=2)] == items[::-1]
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(first.id)
    assert client.responses.create(**TURN, input="so", previous_response_id=second.id).output_text


@pytest.mark.parametrize("query", ["limit=0", "limit=a", "order=up", "after=none"])
def test_a_list_of_items_that_cannot_be(client: openai.OpenAI, http: httpx.Client, query: str) -> None:
    made = client.responses.create(**TURN, input="hello")
    refused = http.get(f"{URL}/{made.id}/input_items?{query}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == query.partition("=")[0]


def test_a_kept_response_is_not_streamed(client: openai.OpenAI, http: httpx.Client) -> None:
    made = client.responses.create(**TURN, input="hello")
    refused = http.get(f"{URL}/{made.id}?stream=true")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


def test_another_keys_response_is_none() -> None:
    with serving(fake_llm(), api_key=["one", "two"]) as served:
        mine, other = (openai.OpenAI(base_url=f"{served.url}/v1", api_key=key) for key in ("one", "two"))
        made = mine.responses.create(**TURN, input="hello")
        with pytest.raises(openai.NotFoundError):
            other.responses.create(**TURN, input="a", previous_response_id=made.id)
        for call in (other.responses.retrieve, other.responses.delete, other.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert mine.responses.retrieve(made.id) == made


def test_what_was_used_least_recently_is_dropped() -> None:
    """By number, and by bytes."""
    few, small = KeptResponses(1000, 2), KeptResponses(80, 9)
    bodies = [{"id": name, "output": []} for name in "abc"]
    for kept in (few, small):
        for body in bodies[:2]:
            kept.keep([], 10, body)
        assert json.loads(kept.find("a").body) == bodies[0]
        kept.keep([], 10, bodies[2])
        assert kept.find("a") and kept.find("c")
        with pytest.raises(RequestBodyError, match="not found"):
            kept.find("b")
    small.remove("a")
    small.keep([], 10, bodies[1])
    assert small.find("b") and small.find("c")
    small.keep([], 101, {"id": "d", "output": []})  # larger than all
    for name in "bcd":
        with pytest.raises(RequestBodyError):
            small.find(name)


def test_what_a_kept_response_counts_for() -> None:
    """Its body, and the items of all turns; no other turn's body, which may repeat long tools and instructions."""
    kept, name = KeptResponses(10_000, 9), None
    for turn in range(4):
        body = validated(ResponseBody, {"input": "hello", "instructions": "a" * 2000, "previous_response_id": name})
        keep = body.request(4096, {}, kept).keep
        assert keep is not None
        name = f"resp_{turn}"
        keep({"id": name, "instructions": "a" * 2000, "output": [{"role": "assistant", "content": "so"}]})
    sizes = [kept.find(f"resp_{turn}").size for turn in range(4)]
    assert len({late - early for early, late in itertools.pairwise(sizes)}) == 1 and sum(sizes) < 10_000
    assert sizes[-1] < 2000 + 4 * 100 + 100
