"""Fields that carry their help and range, and the options made of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from forerun.config import EngineConfig, SamplingParams
from forerun.errors import ConfigError, SamplingError
from forerun.utils.fields import check_options, described, documented, option, option_like


@documented
@dataclass(frozen=True, slots=True)
class Options:
    """Words."""

    count: int = option(3, "How many.", low=1, high=9)
    share: float = option(0.5, "How much.", low=0, above=True, high=1, remedy="Leave it out.")
    size: int | None = option(None, "How large.", low=0)
    length: int | Literal["auto"] = option("auto", "How long.", low=0)
    weight: float = option(1.0, "How heavy.", low=0)
    name: str | None = option(None, "Whose.")
    table: dict[str, int] = option({}, "What.")
    plain: int = 7

    def __post_init__(self) -> None:
        check_options(self, ConfigError)


def test_none_is_the_default_of_every_field() -> None:
    assert Options(**dict.fromkeys(described(Options))) == Options()
    everything: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(SamplingParams))
    assert SamplingParams(**everything) == SamplingParams()
    engine: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(EngineConfig))
    assert EngineConfig(**engine) == EngineConfig()
    assert dataclasses.replace(SamplingParams(min_p=0.5), min_p=None).min_p == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"count": 0}, "count is 0, but must be a whole number in 1..9."),
        ({"count": 10}, "count is 10, but must be a whole number in 1..9."),
        ({"count": 2.0}, "count is 2.0, but must be a whole number in 1..9."),
        ({"count": True}, "count is True, but must be a whole number in 1..9."),
        ({"count": "2"}, "count is '2', but must be a whole number in 1..9."),
        ({"share": 0}, "share is 0, but must be a number above 0 and at most 1. Leave it out."),
        ({"share": float("nan")}, "share is nan, but must be a number above 0 and at most 1. Leave it out."),
        ({"size": -1}, "size is -1, but must be a whole number of 0 or more."),
        ({"size": float("inf")}, "size is inf, but must be a whole number of 0 or more."),
        ({"weight": float("inf")}, "weight is inf, but must be a number of 0 or more."),
        ({"length": "long"}, "length is 'long', but must be a whole number of 0 or more or 'auto'."),
    ],
)
def test_a_number_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**given)
    assert str(caught.value) == message


def test_the_ends_of_a_range_belong_to_it() -> None:
    for given in ({"count": 1}, {"count": 9}, {"share": 1}, {"size": 0}, {"size": 10**400}, {"length": 5}):
        assert dataclasses.asdict(Options(**given)).items() >= given.items()


def test_numbers_of_numpy_become_pythons() -> None:
    options = Options(count=np.int64(4), share=np.float32(0.25))  # type: ignore[arg-type]
    assert (type(options.count), options.count, type(options.share), options.share) == (int, 4, float, 0.25)
    assert type(SamplingParams(seed=np.int64(3)).seed) is int  # type: ignore[arg-type]


def test_help_is_in_the_docstring() -> None:
    assert Options.__doc__ is not None
    assert "Words." in Options.__doc__ and "count: How many. (1..9)" in Options.__doc__
    assert "plain" not in Options.__doc__
    for options in (SamplingParams, EngineConfig):
        assert all(
            f"{name}: {field.option.help}" in (options.__doc__ or "") for name, field in described(options).items()
        )
        assert described(options).keys() == {field.name for field in dataclasses.fields(options)}


def test_a_field_like_another_has_its_help_and_range() -> None:
    @dataclass
    class Other:
        count: int | None = option_like(Options, "count", None, default_text="the caller's")

    made = described(Other)["count"].option
    assert (Other().count, made.help, made.high, made.default_text) == (None, "How many.", 9, "the caller's")


def test_options_that_contradict_each_other_are_refused() -> None:
    for given in ({"min_tokens": 9, "max_tokens": 3}, {"temperature": 0, "n": 2}, {"stop": [""]}, {"tenant": ""}):
        with pytest.raises(SamplingError):
            SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stop": 5}, "stop is of type int, but must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop holds 5"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids holds 1.0"),
        ({"stop_token_ids": "5"}, "stop_token_ids is of type str"),
        ({"stop_token_ids": 5}, "stop_token_ids is of type int"),
        ({"prediction": b"5"}, "prediction is of type bytes"),
        ({"prediction": [True]}, "prediction holds True"),
        ({"logit_bias": [5]}, "logit_bias is of type list"),
        ({"logit_bias": {"five": 1}}, "logit_bias holds 'five'"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 is nan"),
        ({"logit_bias": {5: 10**400}}, "must be a finite number"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no', but must be True or False"),
        ({"tenant": 5}, "tenant is 5, but must be text"),
    ],
)
def test_a_value_of_another_type_is_refused_by_the_fields_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        SamplingParams(**given)


def test_lists_and_keys_are_taken_as_clients_have_them() -> None:
    params = SamplingParams(
        stop_token_ids=np.array([3, 4]),  # type: ignore[arg-type]
        logit_bias={"5": 1, np.int64(6): np.float32(0.5)},  # type: ignore[dict-item]
        prediction=[np.int32(7)],  # type: ignore[list-item]
        stop=["a"],
    )
    assert (params.stop_token_ids, params.prediction, params.stop) == ((3, 4), (7,), ("a",))
    assert params.logit_bias == {5: 1.0, 6: 0.5}
    assert {type(each) for each in (*params.stop_token_ids, *params.logit_bias, *(params.prediction or ()))} == {int}
