"""Requests that cannot be served are refused by value, reason and remedy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM
from forerun.config import SamplingParams
from forerun.drafters import Prediction, PromptLookup
from forerun.engine import Engine
from forerun.engine.request_checks import checked, encode_prediction
from forerun.errors import PromptError, SamplingError


class Letters:
    """A tokenizer: letters a..k are tokens 0..10. It counts what it encodes."""

    calls = 0

    def get_vocab(self) -> dict[str, int]:
        return {chr(ord("a") + index): index for index in range(11)} | {"<end>": 11}

    def __call__(self, text: str, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        self.calls += 1
        return {"input_ids": [11] * add_special_tokens + [ord(letter) - ord("a") for letter in text]}


def encoded(
    prediction: str | Seq[int], drafter: Any = None, tokenizer: Any = None, context_length: int = 8
) -> list[int]:
    params = SamplingParams(prediction=prediction)
    return encode_prediction(params, FakeModel(context_length=context_length), tokenizer, drafter)


def test_a_prediction_is_text_or_token_ids() -> None:
    drafter = Prediction()
    assert encoded("cab", drafter, Letters()) == [2, 0, 1]
    assert encoded((4, 10, 0), drafter) == [4, 10, 0]
    assert encoded([], drafter) == []
    assert encoded("a" * 8, drafter, Letters()) == [0] * 8
    for other in (None, PromptLookup(), drafter):
        assert checked(SamplingParams(), FakeModel(), None, other).prediction is None


@pytest.mark.parametrize(
    ("prediction", "drafter", "tokenizer", "words"),
    [
        ("abc", None, Letters(), "drafter='prediction'"),
        ((1, 2), PromptLookup(), None, "does not use predictions"),
        ("abc", Prediction(), None, "fake has no tokenizer"),
        ((1, 11), Prediction(), None, "token 11, but the vocabulary of fake is 0..10"),
        ("abl", Prediction(), Letters(), "token 11"),
        ("a" * 9, Prediction(), Letters(), "9 tokens, but the context of fake holds 8"),
        ((1,) * 9, Prediction(), None, "Shorten it"),
        ("a" * 41, Prediction(), Letters(), "41 characters, more than the 8 tokens"),
    ],
)
def test_a_prediction_that_cannot_be_used_is_refused(prediction: Any, drafter: Any, tokenizer: Any, words: str) -> None:
    with pytest.raises(SamplingError, match=words):
        encoded(prediction, drafter, tokenizer)


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        ([], {}, PromptError, "is empty"),
        ([1] * 8, {}, PromptError, "8 tokens, but the context of fake holds 8"),
        ([1, 11], {}, PromptError, "Token 11 at position 1"),
        ([1, -1], {}, PromptError, "Token -1 at position 1"),
        ([1], {"stop_token_ids": [3, 12]}, SamplingError, "stop_token_ids names token 12"),
        ([1], {"logit_bias": {11: 1.0}}, SamplingError, "logit_bias names token 11"),
        ([1], {"stop": ["x"]}, SamplingError, "Use stop_token_ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    prompt: list[int], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = FakeModel(context_length=8)
    engine = Engine(model, None)
    assert len(engine.requests([[1] * 7])) == 1
    with pytest.raises(error, match=words):
        engine.requests([prompt], SamplingParams(**options))


def test_a_prediction_that_is_too_long_is_not_encoded() -> None:
    letters = Letters()
    with pytest.raises(SamplingError, match="Shorten it"):
        encoded("a" * 10**6, Prediction(), letters)
    assert letters.calls == 0


def test_a_prediction_is_encoded_once_for_all_prompts() -> None:
    letters = Letters()
    engine = Engine(FakeModel(), Prediction(), tokenizer=letters)
    requests = engine.requests([[1], [2], [3]], SamplingParams(prediction="cab"))
    for request in requests:
        engine.enqueue(request)
    assert letters.calls <= 2  # one looks for tokens of single bytes
    assert [request.params.prediction for request in requests] == [(2, 0, 1)] * 3


def test_an_error_says_which_of_several_prompts_it_means() -> None:
    engine = Engine(FakeModel(context_length=8), None)
    with pytest.raises(PromptError, match=r"^Prompt 1 of 0\.\.2: The prompt has 9 tokens"):
        engine.requests([[1], [2] * 9, [3]])
    with pytest.raises(PromptError, match=r"^The prompt has 9 tokens"):
        engine.requests([[2] * 9])
    llm = LLM(FakeModel(context_length=8), None)
    with pytest.raises(PromptError, match=r"^Prompt 2 of 0\.\.2: The prompt holds an entry of type str"):
        llm.generate([[1], [2], [3, "a"]])
    with pytest.raises(SamplingError, match=r"^Prompt 1 of 0\.\.1: stop_token_ids names token 12"):
        llm.generate([[1], [2]], [SamplingParams(), SamplingParams(stop_token_ids=[12])])
