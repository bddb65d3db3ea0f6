"""Fill in the middle over HTTP: `suffix` of completions, and `/infill` as llama.cpp's server has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from forerun import LLM
from forerun.chat.infill import Infill
from forerun.engine.results import StepOutput, StreamChunk
from forerun.server.protocol.infill_api import LimitedText
from forerun.server.protocol.requests import TextLimits
from pooled import PAGE
from serving import JSON, LIMIT, Served, fake_llm, filling_llm, serving

COMPLETION = {"prompt": "hello", "suffix": "world", "max_tokens": 8, "temperature": 0}
BODY = {"input_prefix": "hello\n", "input_suffix": "world", "prompt": "wor", "n_predict": 8, "temperature": 0}
LLAMA_VIM = {
    "input_extra": [{"text": "a\n", "time": [1, 2], "filename": "x.py"}],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1500,
}
"""What llama.vim sends beside the texts (autoload/llama.vim)."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(filling_llm()) as running:
        yield running


@pytest.fixture(scope="module")
def filling(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=LIMIT, headers=JSON) as made:
        yield made


def post(http: httpx.Client, url: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    response = http.post(url, json={**body, **more})
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def refused(http: httpx.Client, url: str, body: dict[str, Any], **more: Any) -> tuple[str, str]:
    response = http.post(url, json={**body, **more})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def streamed(http: httpx.Client, body: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    response = http.post("/infill", json={**body, "stream": True, **more})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line and not line.startswith(": progress ")]
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_with_a_suffix_is_the_middle(served: Served, filling: httpx.Client) -> None:
    answer = post(filling, "/v1/completions", COMPLETION, return_token_ids=True)
    made = served.llm.infill("hello", "world", max_tokens=8, temperature=0.0, drafter="none")
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == (made.text, made.token_ids)
    assert choice["stop_reason"] is None  # the family's end is as the model's own
    assert choice["prompt_token_ids"] == served.llm.encode(Infill("hello", "world"))
    several = post(filling, "/v1/completions", {**COMPLETION, "prompt": ["hello", "a"]}, return_token_ids=True)
    ids = [choice["prompt_token_ids"] for choice in several["choices"]]
    assert ids == [served.llm.encode(Infill(text, "world")) for text in ("hello", "a")]


def test_an_empty_suffix_is_none(filling: httpx.Client) -> None:
    plain = {name: value for name, value in COMPLETION.items() if name != "suffix"}
    answers = [post(filling, "/v1/completions", {**plain, **more}) for more in ({}, {"suffix": ""})]
    assert answers[0]["choices"][0]["text"] == answers[1]["choices"][0]["text"]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": [1, 2]}, "suffix"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"add_special_tokens": False}, "add_special_tokens"),
        ({"suffix": 3}, "suffix"),
    ],
)
def test_what_a_suffix_does_not_allow_is_named(filling: httpx.Client, more: dict[str, Any], param: str) -> None:
    assert refused(filling, "/v1/completions", COMPLETION, **more)[0] == param


def test_a_model_without_the_tokens_refuses_by_the_field() -> None:
    with serving(fake_llm()) as running, httpx.Client(base_url=running.url, timeout=LIMIT, headers=JSON) as http:
        param, message = refused(http, "/v1/completions", COMPLETION)
        assert param == "suffix"
        assert "no tokens that fill in the middle" in message
        assert refused(http, "/infill", BODY)[0] == "input_prefix"


def test_infill_answers_as_llama_cpp(served: Served, filling: httpx.Client) -> None:
    made = served.llm.infill("hello\nwor", "world", [("x.py", "a\n")], max_tokens=8, temperature=0.0)
    answer = post(filling, "/infill", {**BODY, **LLAMA_VIM}, return_tokens=True)
    assert answer["content"] == made.text
    assert answer["tokens"] == made.token_ids
    assert answer["stop"] is True
    assert answer["stop_type"] == {"stop": "eos", "length": "limit"}[str(made.finish_reason)]
    assert answer["tokens_evaluated"] == len(made.prompt_token_ids)
    assert answer["generation_settings"]["temperature"] == 0
    assert answer["truncated"] is False
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == answer["tokens_evaluated"]
    assert timings["predicted_n"] == answer["tokens_predicted"] == len(made.token_ids)


def test_infill_streams_pieces_and_an_end(filling: httpx.Client) -> None:
    whole = post(filling, "/infill", BODY)
    *pieces, end = streamed(filling, BODY)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [piece["stop"] for piece in pieces] == [False] * len(pieces)
    same = ("stop_type", "tokens_predicted", "tokens_evaluated", "stopping_word", "truncated")
    assert (end["stop"], end["content"]) == (True, "")
    assert [end[name] for name in same] == [whole[name] for name in same]


def test_only_the_fields_of_the_answer_that_are_asked_for(filling: httpx.Client) -> None:
    fields = ["content", "timings/prompt_n", "truncated", "nothing", "content/more"]
    answer = post(filling, "/infill", BODY, response_fields=fields)
    assert [*answer] == ["content", "timings/prompt_n", "truncated"]


def test_a_request_of_no_tokens_fills_the_cache(served: Served, filling: httpx.Client) -> None:
    extra = [{"filename": "y.py", "text": "hello world! " * 2}]
    ahead = {"input_prefix": "", "input_suffix": "", "input_extra": extra, "prompt": "", "samplers": []}
    answer = post(filling, "/infill", {**LLAMA_VIM, **ahead}, n_predict=0, response_fields=[""])
    assert answer == {}
    answer = post(filling, "/infill", {**LLAMA_VIM, **ahead}, n_predict=0)
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    after = post(filling, "/infill", {**BODY, "input_extra": extra})
    ahead_ids = served.llm.encode(Infill("", "", [("y.py", extra[0]["text"])]))
    assert after["timings"]["cache_n"] >= len(ahead_ids) - 2 - PAGE


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n_probs": 3}, "n_probs"),
        ({"mirostat": 2}, "mirostat"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra"),
        ({"n_predict": -2}, "n_predict"),
        ({"n": 2}, "n"),
    ],
)
def test_what_infill_does_not_have_is_named(filling: httpx.Client, more: dict[str, Any], param: str) -> None:
    assert refused(filling, "/infill", BODY, **more)[0] == param


def test_samplers_choose_which_options_count(filling: httpx.Client) -> None:
    given = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 0.3, "repeat_penalty": 1.1, "seed": -1}
    whole = post(filling, "/infill", {**BODY, **given}, response_fields=["generation_settings"])
    some = post(filling, "/infill", {**BODY, **given, "samplers": ["top_k"]}, response_fields=["generation_settings"])
    values = [
        {name: each["generation_settings"][name] for name in ("top_k", "top_p", "temperature")}
        for each in (whole, some)
    ]
    assert values[0] == {"top_k": 5, "top_p": 0.5, "temperature": 0.3}
    assert values[1] == {"top_k": 5, "top_p": 1, "temperature": 1}


def test_several_answers_are_a_list(filling: httpx.Client) -> None:
    body = {**BODY, **LLAMA_VIM, "n_cmpl": 3, "n_indent": 1, "seed": 5}
    del body["temperature"]
    several: Any = post(filling, "/infill", body, return_tokens=True)
    assert [each["index"] for each in several] == [0, 1, 2]
    assert len({each["content"] for each in several}) > 1
    assert several[0]["generation_settings"]["min_p"] == 0.2
    events = streamed(filling, body)
    for index in range(3):
        own = [each for each in events if each["index"] == index]
        assert "".join(each["content"] for each in own) == several[index]["content"]
        assert own[-1]["stop"] is True


def test_extra_files_above_the_context_are_left_out_and_told(served: Served, filling: httpx.Client) -> None:
    most = served.llm.target.context_length
    extra = [{"filename": "a", "text": "x" * most}, {"filename": "b", "text": "hello"}]
    answer = post(filling, "/infill", {**BODY, "input_extra": extra})
    assert answer["truncated"] is True
    assert "oldest 1 of the extra files" in answer["warnings"][0]
    assert (
        answer["tokens_evaluated"] == post(filling, "/infill", {**BODY, "input_extra": extra[1:]})["tokens_evaluated"]
    )
    assert "has" in refused(filling, "/infill", BODY, input_suffix="x" * most)[1]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a\n    b\n  c\n", "a\n    b\n  "),
        ("a\n    b\n\n    c", "a\n    b\n"),
        ("  a\n    b", None),
    ],
)
def test_an_answer_ends_at_a_line_of_less_indentation(text: str, kept: str | None) -> None:
    for size in (1, 3, 100):
        limited = LimitedText(TextLimits(indent=4))
        pieces = []
        for start in range(0, len(text), size):
            output = StepOutput(0, StreamChunk(text[start : start + size], [0]))
            limited.push(output)
            pieces.append(output.chunk.text)
        assert "".join(pieces) == (text if kept is None else kept)
        assert limited.is_over is (kept is not None)


def test_an_answer_ends_at_a_line_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr("forerun.server.protocol.infill_api.time.monotonic", lambda: next(times))
    limited = LimitedText(TextLimits(seconds=2.0))
    over = []
    for text in ("a", "b\n", "c", "d\n", "e\n"):
        output = StepOutput(0, StreamChunk(text, [0]))
        limited.push(output)
        over.append((limited.is_over, output.chunk.text))
    assert over == [(False, "a"), (False, "b\n"), (False, "c"), (True, "d\n"), (True, "")]


def test_a_limit_of_the_text_ends_the_request(served: Served, filling: httpx.Client) -> None:
    line = served.llm.tokenizer.convert_tokens_to_ids("\u010a")  # the end of a line, in a byte-level vocabulary
    biased = {**BODY, "n_predict": 400, "n_indent": 1, "ignore_eos": True, "logit_bias": {str(line): 9}}
    whole = post(filling, "/infill", biased)
    assert whole["content"].count("\n") == 1
    assert whole["content"].endswith("\n")
    assert (whole["stop_type"], whole["has_new_line"]) == ("limit", True)
    assert whole["tokens_predicted"] < 400
    assert "".join(piece["content"] for piece in streamed(filling, biased)) == whole["content"]


@pytest.mark.parametrize("suffix_first", [True, False])
def test_a_keystroke_computes_what_comes_behind_the_cursor(served: Served, suffix_first: bool) -> None:
    llm = filling_llm()
    read = llm.infill_format
    llm.infill_format = replace(read, suffix_first=suffix_first)
    files = [("x.py", "hello\n" * 6), ("y.py", "world\n" * 6)]
    suffix = "hello\n" * 3
    behind = 2 + (0 if suffix_first else len(llm.encode(Infill("", suffix))))
    for typed in range(40):
        prompt = Infill("world\n" * 4 + "a" * typed, suffix, files)
        made = llm.generate(prompt, max_tokens=1)
        new = len(made.prompt_token_ids) - made.stats.num_cached_tokens
        assert new <= behind + PAGE or not typed


def test_the_text_behind_the_cursor_is_drafted_from() -> None:
    made = filling_llm()
    llm = LLM(made.target, "suffix", tokenizer=made.tokenizer, num_draft_tokens=3)
    assert llm.drafter is not None
    drafts: list[list[int]] = []
    draft = llm.drafter.draft

    def noting(*given: Any, **options: Any) -> Any:
        found = draft(*given, **options)
        drafts.extend(list(each.token_ids) for each in found)
        return found

    llm.drafter.draft = noting  # type: ignore[method-assign]
    first, *behind = llm.tokenizer("xyzw", add_special_tokens=False)["input_ids"]
    llm.infill("a", "bcxyzwd", max_tokens=8, temperature=0.0, logit_bias={first: 90.0})
    assert any(each[: len(behind)] == behind[: len(each)] for each in drafts if each)
