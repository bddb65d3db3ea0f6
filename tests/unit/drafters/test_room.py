"""A drafter that gives as many nodes as it is asked for, to the end of an output: the engine cuts what is too deep."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from typing import Any

import pytest
import torch

from doubles import FakeModel, MarkovModel, Scripted
from forerun import LLM, SamplingParams
from forerun.config import EngineConfig
from forerun.drafters import Hybrid, Traits
from forerun.drafters.hybrid.by_request import ByRequest
from forerun.engine import Engine
from forerun.lab.audit.statistics import NOTHING, g_test
from forerun.speculation import AutomaticPolicy, CostModel, DraftChooser, FixedPolicy, SpeculationPolicy, TrimmingPolicy
from forerun.types import Draft, Sequence

K = 5
PROMPT, LENGTH = [1, 2, 3], 4
RIGHT = FakeModel().greedy(PROMPT, 40)
TARGET, PROPOSED = (torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


class Exactly(Scripted):
    """Looks at no sequence's room."""

    def draft(
        self, sequences: Seq[Sequence], num_draft_tokens: Seq[int], min_acceptance_prob: float = 0.0
    ) -> list[Draft]:
        pairs = zip(sequences, num_draft_tokens, strict=True)
        return [self.propose(sequence, k) if k else Draft.empty() for sequence, k in pairs]  # type: ignore[misc]


def right(sequence: Sequence, k: int) -> list[int]:
    return RIGHT[sequence.num_output :][:k]


def tree(sequence: Sequence, k: int) -> Draft:
    """The right chain, each node but a last one before a wrong sibling."""
    tokens, parents, parent = list[int](), list[int](), -1
    for token in right(sequence, -(-k // 2)):
        pair = [token, (token + 1) % 11][: k - len(tokens)]
        parents += [parent] * len(pair)
        parent = len(tokens)
        tokens += pair
    sources, probs = tuple(f"node {node}" for node in range(k)), [1 / (1 + node) for node in range(k)]
    return Draft(tokens, parents, num_candidates=k - 1, sources=sources, accept_probs=probs)


def estimated(sequence: Sequence, k: int) -> Draft:
    draft = Draft.chain(right(sequence, k))
    draft.accept_probs = [0.99**node for node in range(k)]
    return draft


DRAFTS: dict[str, Callable[[Sequence, int], Draft]] = {
    "chain": lambda sequence, k: Draft.chain(right(sequence, k)),
    "tensor": lambda sequence, k: Draft(torch.tensor(right(sequence, k)), list(range(-1, k - 1))),
    "drawn chain": lambda sequence, k: Draft.chain(right(sequence, k), torch.eye(11)[[*right(sequence, k), 0]]),
    "tree": tree,
    "hidden": lambda sequence, k: Draft(
        right(sequence, k), list(range(-1, k - 1)), hidden=torch.zeros(k + 1, 2), first_layer=1
    ),
    "estimated": estimated,
}


def automatic(kind: str) -> SpeculationPolicy:
    """A policy to which drafts seem to be free and right."""
    costs = CostModel()
    for rows in (1, 2, 4, 8, 16, 32):
        costs.add_target("greedy", 1, 0, rows, 1.0, 5)
    for k in (1, 4, K):
        costs.add_draft(1, k, 1e-6)
    if kind == "estimated":
        return TrimmingPolicy(costs)
    fixed_length = K if kind == "fixed length" else None
    return AutomaticPolicy(DraftChooser(costs, fixed_length, ((0.99,) * K, ())))


POLICIES: dict[str, Callable[[str], SpeculationPolicy]] = {"K": lambda _: FixedPolicy(K), "auto": automatic}


def test_all_that_belongs_to_a_node_goes_or_stays_with_it() -> None:
    probs = torch.arange(18.0).reshape(6, 3)
    whole = Draft([0, 1, 2, 1, 0], [-1, 0, 1, -1, 0], probs, num_candidates=4)
    whole.sources, whole.accept_probs = tuple("abcde"), [0.9, 0.8, 0.7, 0.6, 0.5]
    assert whole.within(3) is whole.within(5) is whole
    cut = whole.within(2)
    assert (cut.ids, cut.parents, cut.num_candidates) == ([0, 1, 1, 0], [-1, 0, -1, 0], 3)
    assert (cut.sources, cut.accept_probs) == (tuple("abde"), [0.9, 0.8, 0.6, 0.5])
    assert cut.probs is not None and torch.equal(cut.probs, probs[[0, 1, 2, 4, 5]])
    assert not len(whole.within(0)) and whole.within(0).num_candidates == 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [*DRAFTS, "fixed length"])
def test_a_draft_is_cut_where_the_output_ends(kind: str, policy: str) -> None:
    fake: Any = FakeModel()
    drafter = Exactly(DRAFTS.get(kind, DRAFTS["chain"]))
    drafter.traits = Traits(("Exactly",), fixed_length_draft=K if kind == "fixed length" else None)
    engine = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=K), policy=POLICIES[policy](kind))
    engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=LENGTH))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (output,) = outputs
    assert output.error is None
    assert output.choice.token_ids == RIGHT[:LENGTH]
    drafts = [step.draft for step in drafter.steps if step.draft is not None and len(step.draft)]
    assert output.choice.stats.num_accepted_tokens > 0 and drafts
    room = LENGTH - 2  # behind the token of the prompt's step
    assert drafts[0].depth == (1 if kind == "tree" and policy == "auto" else room)
    if policy == "K":
        assert len(drafts[0]) == (4 if kind == "tree" else room)


@pytest.mark.parametrize(
    "around", [lambda each: Hybrid([each]), lambda each: ByRequest({"it": each})], ids=["hybrid", "by request"]
)
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_within_other_drafters_too(kind: str, around: Callable[[Any], Any]) -> None:
    drafter = around(Exactly(DRAFTS[kind]))
    llm = LLM(FakeModel(), drafter, num_draft_tokens=K)  # type: ignore[arg-type]
    found = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=LENGTH))[0]
    assert found.token_ids == RIGHT[:LENGTH] and found.stats.num_accepted_tokens


def drawn(sequence: Sequence, k: int, shape: Seq[int], generator: torch.Generator) -> Draft:
    """Nodes of this shape, each drawn from a distribution that the token before it gives."""
    tokens: list[int] = []
    rows = [PROPOSED[sequence.token_ids[-1]].softmax(-1)]
    for parent in shape[:k]:
        tokens.append(int(torch.multinomial(rows[parent + 1], 1, generator=generator)))
        rows.append(PROPOSED[tokens[-1]].softmax(-1))
    return Draft(tokens, list(shape[:k]), torch.stack(rows))


@pytest.mark.parametrize("shape", [(-1, 0, 1, 2, 3), (-1, 0, -1, 2, 1, 0)], ids=["chain", "tree"])
def test_a_cut_draft_that_was_drawn_is_exact(shape: Seq[int]) -> None:
    """All texts of three tokens are counted, and each has a draft that is too deep."""
    generator = torch.Generator().manual_seed(7)
    drafter = Exactly(lambda sequence, k: drawn(sequence, k, shape, generator))
    model: Any = MarkovModel(TARGET)
    llm = LLM(model, drafter, num_draft_tokens=len(shape), max_batch=256, seed=3)
    found = llm.generate([[0]] * 2500, SamplingParams(max_tokens=3, ignore_eos=True))
    assert (
        0 < sum(each.stats.num_accepted_tokens for each in found) < sum(each.stats.num_draft_tokens for each in found)
    )
    tokens = torch.tensor([each.token_ids for each in found])
    counts = torch.bincount((tokens * torch.tensor([9, 3, 1])).sum(-1), minlength=27)
    chances = TARGET.double().softmax(-1)
    expected = torch.einsum("a,ab,bc->abc", chances[0], chances, chances).flatten()
    assert (NOTHING + g_test(counts.numpy(), expected.numpy())).p_value > 1e-3
