"""Random values of every sampling option: refused by the option's name, or served alike with and without a drafter."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, strategies as st

from doubles import FakeModel
from forerun import LLM, Hybrid, PromptLookup, SamplingParams, Suffix
from forerun.errors import SamplingError
from forerun.utils.fields import described
from fuzzing import examples
from small_tokenizers import TURN, byte_level

FIELDS = described(SamplingParams)
TOKENIZER = byte_level()
MODEL = FakeModel(len(TOKENIZER), seed=5, num_contexts=97, eos_token_ids=[3])
PROMPT = [1, 2, 3, 1, 2]
NUMBERS = [0, 1, 2, 5, -1, 0.5, 1.0, 1.5, 100, 101, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, -0.0]
NUMBERS += [5e-324, 1e-46, 1e-38, 1e-10, 1e30, 1e31, 1e308, math.nan, math.inf, -math.inf, Fraction(1, 3)]
NUMPY = [np.int64(3), np.uint8(1), np.float32(0.5), np.float64(0.9), np.float16(1), np.int64(-1), np.float32("nan")]
OTHERS = [None, True, False, "", "a", "0.5", b"a", [], {}, [1], [None], ["a"], [""], {1: 1}, {"1": 1}, object(), 1j]
ENTRIES = [*NUMBERS[:9], *NUMPY[:3], True, None, "1", "a", "", TURN, 1.5, math.nan, 10**9, len(TOKENIZER) - 1, "7"]
CONTAINERS = [
    st.lists(st.sampled_from(ENTRIES), max_size=3),
    st.lists(st.integers(0, 300), max_size=3),
    st.lists(st.sampled_from(["a", "hello", "\ufffd", TURN, "é"]), max_size=3),
    st.dictionaries(st.sampled_from(ENTRIES[:-2]), st.sampled_from([*NUMBERS, *NUMPY]), max_size=3),
    st.dictionaries(st.integers(0, 260), st.floats(allow_nan=False, allow_infinity=False), max_size=3),
]


def values(name: str) -> st.SearchStrategy[Any]:
    """Values of one option: its borders and what lies beside them, odd numbers, other types, lists and mappings."""
    option = FIELDS[name].option
    borders = [each for low in (option.low, option.high) if math.isfinite(low) for each in (low, low - 1, low + 1)]
    single = st.sampled_from([*borders, *NUMBERS, *NUMPY, *OTHERS])
    return st.one_of(single, *CONTAINERS)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Some options, most of them of the right kind, so that whole requests come about."""
    sound = {
        "temperature": st.sampled_from([0, 0.5, 1, 1e-30, 100]),
        "top_k": st.integers(0, 300),
        "top_p": st.one_of(st.floats(1e-300, 1), st.sampled_from([5e-324, 1e-46, 1e-38])),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.01, 100),
        "presence_penalty": st.floats(-100, 100),
        "frequency_penalty": st.floats(-100, 100),
        "logit_bias": CONTAINERS[-1],
        "min_tokens": st.integers(0, 12),
        "stop": CONTAINERS[2],
        "stop_token_ids": st.lists(st.integers(0, 260), max_size=2),
        "logprobs": st.sampled_from([None, 0, 20]),
        "prompt_logprobs": st.sampled_from([None, 0, 3]),
    }
    chosen = {name: draw(sound[name]) for name in draw(st.lists(st.sampled_from(sorted(sound)), max_size=4))}
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=1)):
        chosen[name] = draw(values(name))
    return chosen


def made(given_options: dict[str, Any]) -> SamplingParams | str:
    """The options, or the refusal."""
    try:
        return SamplingParams(**given_options)
    except SamplingError as error:
        return str(error)


def served(drafter: Any, params: SamplingParams) -> Any:
    """The answer, and the text of a stream; or the refusal."""
    llm = LLM(MODEL, drafter, tokenizer=TOKENIZER, num_draft_tokens=5)
    try:
        result = llm.generate(PROMPT, params)
        streamed = ["" for _ in result.choices]
        for chunk in llm.stream(PROMPT, params):
            streamed[chunk.index] += chunk.text
    except SamplingError as error:
        assert not llm.engine.has_work
        return str(error)
    assert streamed == [choice.text for choice in result.choices]
    return [(choice.token_ids, choice.text, choice.finish_reason) for choice in result.choices]


@examples(60)
@given(given_options=options())
def test_options_are_refused_by_name_or_served_alike(given_options: dict[str, Any]) -> None:
    params = made(given_options)
    if isinstance(params, str):
        assert any(name in params for name in given_options), params
        return
    short = {"max_tokens": min(params.max_tokens, 12), "min_tokens": min(params.min_tokens, 12), "n": min(params.n, 2)}
    if short["min_tokens"] > short["max_tokens"]:
        short["max_tokens"] = 12
    keyed = {"seed": 5 if params.seed is None else params.seed}  # the same draws with and without a drafter
    plain_values = {name: getattr(params, name) for name in FIELDS} | short | keyed
    params = SamplingParams(**plain_values)
    json.dumps({name: list(value) if name == "logit_bias" else value for name, value in plain_values.items()})
    plain = served(None, params)
    for drafter in (PromptLookup(), Hybrid([PromptLookup(), Suffix()])):
        assert served(drafter, params) == plain
    if isinstance(plain, str):
        assert any(name in plain for name in [*given_options, "prediction"])


@examples(120)
@given(data=st.data())
def test_every_field_takes_or_refuses_any_value(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FIELDS)))
    value = data.draw(values(name))
    params = made({name: value})
    assert not isinstance(params, str) or name in params, params
    assert value is not None or params == SamplingParams()
