"""Acceptance without drafting is that of drafting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from families import make_family
from forerun.drafters.models.eagle.model import EagleModel
from forerun.models import Model, Rows, load_model
from forerun.speculation.predictor import CostsByK
from forerun.train.card import NOT_JUDGED
from forerun.train.data.packed import NO_DOCUMENT, PackedDocument, PackedShard, pack
from forerun.train.eagle import EagleHeadModule, EagleKind
from forerun.train.evaluate import acceptance_of
from forerun.train.heads import evaluate as heads_evaluate
from forerun.train.heads.card import HeadReport
from forerun.train.heads.evaluate import HeldOut, answers_alone
from forerun.train.heads.options import EagleTraining
from forerun.train.heads.target_states import TargetStates, TrainingTarget
from heads import random_head

K, PROMPT, TOKENS = 3, 4, 40


class WideStates(TargetStates):
    """States as drafting reads them, unrounded."""

    dtype = torch.float64


def states_of(target: Model, text: list[int], layers: Sequence[int]) -> Tensor:
    return WideStates(target, layers).of(torch.tensor(text), [len(text)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(make_family("llama", tmp_path_factory.mktemp("family")), dtype="float64")


def greedy_text(target: Model, seed: int) -> list[int]:
    cache = target.new_cache()
    text = torch.randint(0, target.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
    fed = text
    for _ in range(TOKENS):
        logits = target.forward([Rows(cache, fed, num_logits=1)]).logits
        cache.commit(range(len(fed)))
        fed = [int(logits[0].argmax())]
        text = text + fed
    return text


def drafted(head: EagleModel, target: Model, text: list[int]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """Reached and accepted by position, and (context, accepted) of each chain, by drafting along a text."""
    states = head.fuse(states_of(target, text, head.config.layers))
    reached, accepted, chains = [0] * K, [0] * K, []
    end = PROMPT + 1  # tokens that are committed
    while end + K <= len(text):
        cache = head.new_cache()
        found = head.forward([Rows(cache, text[1:end], num_logits=1, num_hidden_outputs=1, states=states[: end - 1])])
        run = 0
        for step in range(K):
            reached[step] += 1
            token = int(head.token_ids[found.logits[0].argmax()])
            if token != text[end + step]:
                break
            accepted[step] += 1
            run += 1
            assert found.hidden_outputs is not None
            found = head.forward([Rows(cache, [token], states=found.hidden_outputs[:, 0])])
        chains.append((end, run))
        end += run + 1
    return reached, accepted, chains


def test_chains_along_an_answer_are_those_that_are_drafted(
    target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_evaluate, "CONTEXTS", (0, 16, 32))
    texts = [greedy_text(target, seed) for seed in range(5)]
    counts = torch.bincount(torch.cat([torch.tensor(text) for text in texts]))
    common = counts.argsort(descending=True)[:2].sort().values
    head = random_head(target, draft_vocab_size=2, layers=(0, target.num_layers), norm_output=True)
    head = replace(head, d2t=common - torch.arange(2))
    wanted = [False] * PROMPT + [True] * TOKENS
    other = torch.randint(0, target.vocab_size, (PROMPT + TOKENS,)).tolist()  # no greedy answer
    documents = [PackedDocument(text, wanted) for text in [*texts, other]]
    rows = pack(documents, tmp_path / "packed", window=90, vocab_size=target.vocab_size, made_from={})
    module = EagleHeadModule(head.config).double()
    module.load_state_dict({name: tensor.double() for name, tensor in head.tensors.items()})
    of = TrainingTarget(target, WideStates(target, head.config.layers), target.output_rows(common).double(), common)
    score = HeldOut(of, PackedShard(rows.folder), 9, common, K, EagleKind(EagleTraining()).predict).score(module)
    served = EagleModel(head, target)
    parts = [drafted(served, target, text) for text in texts]
    assert score.reached == [sum(part[0][step] for part in parts) for step in range(K)]
    assert score.accepted == [sum(part[1][step] for part in parts) for step in range(K)]
    assert score.accepted[1] > 2 and score.accepted[0] < score.reached[0]
    assert (score.greedy_documents, score.documents) == (5, 6)
    late = [run for part in parts for end, run in part[2] if end >= 32]
    assert score.by_context[32] == (len(late), sum(late))
    assert score.mean_acceptance_length == 1 + sum(score.accepted) / score.reached[0]
    assert 0 < score.overlap[0] < 1 and 1 < score.expected_length < 1 + K


def test_an_answer_is_the_run_of_wanted_tokens_at_the_end_of_its_document() -> None:
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, NO_DOCUMENT]])
    wanted = torch.tensor([[0, 1, 0, 1, 0, 1, 1, 0]]).bool()
    assert answers_alone(wanted, documents).int().tolist() == [[0, 0, 0, 1, 0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("first", "constant", "is_chance"), [(5, 0.05, False), (1, 0.1, True), (1, 0.2, True), (2, 0.1, False)]
)
def test_a_head_that_is_no_better_than_the_most_frequent_token_is_none(
    first: int, constant: float, is_chance: bool
) -> None:
    costs = CostsByK(1.0, [1.0] * 3, [0.0] * 3, [0.0] * 3)
    text = Counter({7: round(100 * constant), **dict.fromkeys(range(1_000, 1_100 - round(100 * constant)), 1)})
    greedy = heads_evaluate.HeadScore(2, reached=[10, first], accepted=[first, 0], frequencies=text)
    drawn = heads_evaluate.HeadScore(2, starts=10, survived=[float(first), 0.0], frequencies=text)
    for score in (greedy, drawn):
        lines = HeadReport.of(score, costs).lines()
        assert score.is_chance == is_chance == lines[-1].startswith("- This is no head yet: the first token of its")
    assert not heads_evaluate.HeadScore(2, frequencies=text).is_chance  # nothing was judged


def test_the_predicted_speed_up_is_of_measured_steps() -> None:
    costs = CostsByK(10.0, [9.0, 10.0, 11.0], [0.5, 2.0, 3.0], [0.5, 1.0, 1.0])
    score = heads_evaluate.HeadScore(2, reached=[10, 5], accepted=[5, 4])
    speedups = HeadReport.of(score, costs).speedups
    assert speedups[1] == pytest.approx(1.5 * 10 / 13) and speedups[2] == pytest.approx(1.9 * 10 / 15)


def test_nothing_is_said_of_what_could_not_be_judged() -> None:
    costs = CostsByK(10.0, [9.0, 10.0, 11.0], [0.5, 2.0, 3.0], [0.5, 1.0, 1.0])
    report = HeadReport.of(heads_evaluate.HeadScore(2), costs)
    assert report.speedups == {} and report.lines() == [f"- Evaluation: {NOT_JUDGED}"]
    assert report.record()["mean_acceptance_length"] is report.record()["overlap_at_temperature_1"] is None
    drawn = heads_evaluate.HeadScore(2, starts=10, survived=[5.0, 4.0], documents=1)
    report = HeadReport.of(drawn, costs)  # no answer is greedy
    assert report.speedups[2] == pytest.approx(1.9 * 10 / 15) and report.record()["per_position"] is None
    assert report.record()["per_position_at_temperature_1"] == [0.5, 0.8]
    assert "on 0 of 1 held-out answers: nothing to judge by" in report.lines()[0]
    assert acceptance_of([torch.ones(3)], 0.0, 4) == acceptance_of([], 1.0, 4) == []
