"""Logits that are NaN or infinite: of the target they end their request, of a draft model they draft nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from doubles import FakeModel, Scripted, tree_draft
from families import VOCAB, make_family
from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import DraftModel, DraftTree, Hybrid, Staged
from forerun.engine import Engine, StepOutput
from forerun.errors import BatchError, ConfigError, NonFiniteError
from forerun.kernels.cpu.linear import NativeLinear
from forerun.models import load_model
from forerun.speculation.acceptance import bin_of
from forerun.types import Draft

GOOD, BAD = [1, 2, 3], [6, 6]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.3},
    "seeded": {"seed": 4},
    "drawn": {},
    "filtered": {"top_k": 3, "top_p": 0.9, "min_p": 0.01},
    "seeded and filtered": {"seed": 4, "top_k": 2},
}
VALUES = {
    "a NaN": (slice(4, 5), torch.nan),
    "NaN": (slice(None), torch.nan),
    "inf": (slice(4, 5), torch.inf),
    "-inf": (slice(None), -torch.inf),
}


def broken(fake: FakeModel, path: list[int], value: str) -> FakeModel:
    """The model with such logits after a path."""
    columns, number = VALUES[value]
    fake.table[fake.slot(path), columns] = number
    return fake


def run(engine: Engine) -> dict[int, StepOutput]:
    last: dict[int, StepOutput] = {}
    while engine.has_work:
        for output in engine.step():
            last[output.request_id] = output
    return last


def params(kind: str, **rest: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, **KINDS[kind], **rest})


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_request_ends_and_others_go_on(kind: str, value: str) -> None:
    fake: Any = broken(FakeModel(), BAD, value)
    engine = Engine(
        fake,
        Scripted(lambda _, num_draft_tokens: [0] * num_draft_tokens),
        config=EngineConfig(num_draft_tokens=3, seed=1),
    )
    ids = [engine.add(prompt, params(kind)) for prompt in (GOOD, BAD, GOOD)]
    last = run(engine)
    assert isinstance(last[ids[1]].error, NonFiniteError)
    assert "fake computed logits that are NaN or infinite" in str(last[ids[1]].error)
    for index in (0, 2):
        choice = last[ids[index]].choice
        assert choice is not None and len(choice.token_ids) == 10
        if kind == "greedy":
            assert choice.token_ids == FakeModel().greedy(GOOD, 10)
    assert all(cache.freed for cache in fake.caches)


@pytest.mark.parametrize("quantize", ["int4", "int4-a16", "int8", "int8-a8"])
@pytest.mark.usefixtures("native_library")
def test_a_row_of_quantized_activations_ends_its_request_alone(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = load_model(make_family("llama", tmp_path), quantize=quantize), NativeLinear.rows

    def rows_of(linear: NativeLinear, index: torch.Tensor) -> torch.Tensor:
        found = rows(linear, index)
        found[index == VOCAB - 1, 3] = torch.nan
        return found

    def outputs(*prompts: list[int]) -> list[StepOutput]:
        engine = Engine(model)
        ids = [engine.add(prompt, params("greedy", logit_bias={VOCAB - 1: -100})) for prompt in prompts]
        last = run(engine)
        return [last[each] for each in ids]

    monkeypatch.setattr(NativeLinear, "rows", rows_of)
    others = [[5, 3, 8, 40], [VOCAB - 2]]
    first, ended, second = outputs(others[0], [7, VOCAB - 1, 2], others[1])
    assert isinstance(ended.error, NonFiniteError)
    for together, prompt in zip((first, second), others, strict=True):
        (alone,) = outputs(prompt)
        assert together.choice is not None and alone.choice is not None
        assert together.choice.token_ids == alone.choice.token_ids and len(alone.choice.token_ids) == 10


def test_some_tokens_may_be_masked() -> None:
    fake: Any = FakeModel()
    fake.table[:, 3] = -torch.inf
    for kind in KINDS:
        (output,) = run_one(fake, params(kind))
        assert output.error is None


def run_one(fake: Any, request: SamplingParams) -> list[StepOutput]:
    engine = Engine(fake)
    engine.add(GOOD, request)
    return list(run(engine).values())


def uniform(rows: int) -> torch.Tensor:
    return torch.full((rows, 11), 1 / 11)


def after_right(fake: FakeModel, shape: str, drawn: bool) -> Any:
    """The greedy path and others, chosen or drawn from the uniform distribution."""

    def propose(sequence: Any, num_draft_tokens: int) -> Draft:
        ids = fake.greedy(sequence.token_ids, min(num_draft_tokens, 2))
        if shape == "chain" or len(ids) < 2 or num_draft_tokens < 4:
            return Draft.chain(ids, uniform(len(ids) + 1) if drawn else None)
        others = [(token_id + 1) % 11 for token_id in ids]
        tokens, parents = [ids[0], others[0], ids[1], others[1]], [-1, -1, 0, 0]
        return tree_draft(tokens, parents, probs=uniform(5) if drawn else None, replacement=False)

    return Scripted(propose)


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "drawn"])
@pytest.mark.parametrize("rule", [None, "token", "typical"])
def test_a_row_inside_a_draft(rule: str | None, kind: str, shape: str, drawn: bool) -> None:
    """The request ends where plain decoding ends: the tokens before are right, and nothing comes after."""
    clean = FakeModel(seed=3)
    output = clean.greedy(GOOD, 10)
    fake: Any = broken(FakeModel(seed=3), GOOD + output[:4], "NaN")
    engine = Engine(
        fake, after_right(clean, shape, drawn), config=EngineConfig(num_draft_tokens=4, acceptance=rule, seed=0)
    )
    request = engine.add(GOOD, params(kind, temperature=0.0 if kind == "greedy" else 0.05), stream=True)
    ids: list[int] = []
    error: Exception | None = None
    while engine.has_work:
        for each in engine.step():
            assert each.request_id == request
            ids += each.chunk.token_ids
            error = each.error or error
    assert isinstance(error, NonFiniteError)
    assert ids == output[: len(ids)] and len(ids) <= 4


def test_a_row_that_no_verdict_comes_by_ends_nothing() -> None:
    """After a rejected token, or after the end of the output, as in plain decoding."""
    clean = FakeModel(seed=3)
    output = clean.greedy(GOOD, 10)
    fake: Any = broken(FakeModel(seed=3), GOOD + output[:6], "NaN")
    for options in ({"max_tokens": 6}, {"stop_token_ids": (output[5],)}):
        engine = Engine(fake, after_right(clean, "chain", False), config=EngineConfig(num_draft_tokens=4))
        engine.add(GOOD, params("greedy", **options))
        (last,) = run(engine).values()
        assert last.choice is not None
        assert last.choice.token_ids == output[:6][: output.index(output[5]) + 1]
    wrong = FakeModel(seed=3)
    broken(wrong, [*GOOD, (output[0] + 1) % 11], "NaN")
    target: Any = wrong
    engine = Engine(
        target, Scripted(lambda sequence, _: [(output[0] + 1) % 11]), config=EngineConfig(num_draft_tokens=1)
    )
    engine.add(GOOD, params("greedy", max_tokens=3))
    (last,) = run(engine).values()
    assert last.choice is not None and last.choice.token_ids == output[:3]


def test_the_answers_of_others_are_in_the_error() -> None:
    target: Any = broken(FakeModel(), BAD, "NaN")
    llm = LLM(target, None)
    greedy = params("greedy")
    with pytest.raises(
        BatchError, match="1 of 3 requests failed, the first of them at index 1 with NonFiniteError"
    ) as (caught):
        llm.generate([GOOD, BAD, [4]], greedy)
    error = caught.value
    assert error.generations[1] is None
    assert [error.generations[i].token_ids for i in (0, 2)] == [target.greedy(GOOD, 10), target.greedy([4], 10)]
    assert list(error.errors) == [1] and isinstance(error.errors[1], NonFiniteError)
    with pytest.raises(NonFiniteError):
        llm.generate(BAD, greedy)
    with pytest.raises(NonFiniteError):
        list(llm.stream(BAD, greedy))
    assert not llm.engine.has_work and not llm.shared._inboxes
    assert llm.generate([GOOD], greedy)[0].token_ids == target.greedy(GOOD, 10)


def test_texts_of_other_errors_stay_out_of_the_batchs() -> None:
    error = BatchError([None, "answer"], {0: KeyError("the prompt's secret")})
    assert "secret" not in str(error) and "KeyError" in str(error)
    assert not isinstance(error, ConfigError)


def draft_model(value: str, everywhere: bool) -> Any:
    model = FakeModel(order=2, num_contexts=13)
    columns, number = VALUES[value]
    model.table[slice(None) if everywhere else slice(0, None, 5), columns] = number
    model.name = "sick"
    return model


MAKE: dict[str, Any] = {
    "draft-model": DraftModel,
    "draft-tree": DraftTree,
    "static tree": lambda model: DraftTree(model, shape="static"),
    "chosen tree": lambda model: DraftTree(model, drawn=False),
    "staged": Staged,
    "hybrid": lambda model: Hybrid([DraftModel(model)]),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("k", [4, "auto"])
@pytest.mark.parametrize("name", MAKE)
def test_a_draft_model_that_is_not_finite(
    name: str, k: Any, everywhere: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target: Any = FakeModel(order=2, num_contexts=13)
    for value in ("a NaN", "-inf"):
        caplog.clear()
        llm = LLM(target, MAKE[name](draft_model(value, everywhere)), num_draft_tokens=k, seed=0)
        plain = LLM(target, None, seed=0)
        with caplog.at_level(logging.WARNING):
            for kind in ("greedy", "seeded", "drawn"):
                request = params(kind, max_tokens=16)
                results, expected = llm.generate([GOOD, [4]], request), plain.generate([GOOD, [4]], request)
                assert [len(result.token_ids) for result in results] == [16, 16]
                if kind != "drawn":
                    assert [each.token_ids for each in results] == [each.token_ids for each in expected]
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == 1 or (k == "auto" and not messages)  # which may not ask at such a place
        assert all("sick" in message for message in messages)


def test_a_confidence_of_nan_is_a_level() -> None:
    assert [bin_of(value, 12) for value in (float("nan"), -1.0, 0.0, 1.0, float("inf"))] == [0, 0, 0, 11, 11]
