"""Requests under a grammar in the engine: drafts, batches, errors. The grammars are automata over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from doubles import FakeModel, Scripted
from forerun import GrammarDeadEndError, GrammarError, SamplingParams
from forerun.config import EngineConfig
from forerun.engine import Engine, StepOutput
from forerun.errors import NonFiniteError
from forerun.sampling.grammar import SOURCE
from forerun.speculation import DraftOutcome, DraftPlan, FixedPolicy, StepCost
from forerun.types import Draft, Sequence
from grammars import ANY, Automaton, random_automaton

VOCAB, END = 11, 0
PROMPTS = [[1, 2, 3], [4, 5], [7, 7, 7, 1]]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.3},
    "biased": {"temperature": 0.0, "logit_bias": {3: 2.0, 4: -3.0}},
    "seeded": {"seed": 4},
    "filtered": {"seed": 4, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
}


def engine(automaton: Automaton, drafter: Any = None, k: Any = 0, **config: Any) -> Engine:
    fake: Any = FakeModel(VOCAB, eos_token_ids=[END])
    made = Engine(fake, drafter, config=EngineConfig(num_draft_tokens=k, seed=1, **config))
    grammars: Any = automaton
    made.grammars = grammars
    return made


def run(made: Engine) -> dict[tuple[int, int], StepOutput]:
    """The last output of each choice."""
    last: dict[tuple[int, int], StepOutput] = {}
    while made.has_work:
        for output in made.step():
            last[output.request_id, output.chunk.index] = output
    return last


def tokens(made: Engine, asked: list[SamplingParams]) -> list[list[list[int]]]:
    """Of each request, the tokens of its choices; every cache is free afterwards."""
    ids = [made.add(PROMPTS[i % len(PROMPTS)], params) for i, params in enumerate(asked)]
    last = run(made)
    assert [output.error for output in last.values() if output.error] == []
    fake: Any = made.target
    assert all(cache.freed for cache in fake.caches)
    return [
        [last[request, choice].choice.token_ids for choice in range(params.n)]  # type: ignore[union-attr]
        for request, params in zip(ids, asked)
    ]


def scripted(seed: int, make: Callable[[torch.Generator, Sequence, int], Draft]) -> Scripted:
    generator = torch.Generator().manual_seed(seed)
    return Scripted(lambda sequence, num_draft_tokens: make(generator, sequence, num_draft_tokens))


def chain(generator: torch.Generator, sequence: Sequence, num_draft_tokens: int) -> Draft:
    return Draft.chain(torch.randint(0, VOCAB, (num_draft_tokens,), generator=generator))


def tree(generator: torch.Generator, sequence: Sequence, num_draft_tokens: int) -> Draft:
    parents = [
        int(torch.randint(-1, node, (1,), generator=generator)) if node else -1 for node in range(num_draft_tokens)
    ]
    draft = Draft(torch.randint(0, VOCAB, (num_draft_tokens,), generator=generator), parents)
    return draft if draft.depth <= sequence.room else Draft.empty()


def right_below_the_grammar(generator: torch.Generator, sequence: Sequence, num_draft_tokens: int) -> Draft:
    """Several children at every place along a path that the grammar allows, so that much is accepted."""
    draft, node = Draft([], []), -1
    path: list[int] = []
    while len(draft) + VOCAB <= num_draft_tokens and len(path) < sequence.room:
        first = len(draft)
        for token_id in range(VOCAB):
            draft.add(token_id, node)
        viable = [True] * len(draft)
        if sequence.constraint is not None:
            viable = sequence.constraint.viable(sequence, draft)
        nodes = [each for each in range(first, len(draft)) if viable[each]]
        if not nodes:
            break
        node = nodes[int(torch.randint(0, len(nodes), (1,), generator=generator))]
        path.append(draft.ids[node])
    return Draft(draft.ids, draft.parents)


def probed(generator: torch.Generator, sequence: Sequence, num_draft_tokens: int) -> Draft:
    draft = chain(generator, sequence, num_draft_tokens)
    draft.num_candidates = num_draft_tokens // 2
    return draft


DRAFTS = {"chain": chain, "tree": tree, "wide": right_below_the_grammar, "probes": probed, "none": None}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_and_without_drafts(kind: str, drafts: str) -> None:
    make = DRAFTS[drafts]
    for seed in range(4):
        automaton = random_automaton(seed, VOCAB, end_id=END)
        asked = [
            SamplingParams(max_tokens=30, grammar=ANY, **KINDS[kind]),
            SamplingParams(max_tokens=20, **KINDS[kind]),
            SamplingParams(max_tokens=30, grammar=ANY, **KINDS[kind]),
        ]
        plain = tokens(engine(automaton), asked)
        drafter = None if make is None else scripted(seed, make)
        assert tokens(engine(automaton, drafter, k=40 if drafts == "wide" else 7), asked) == plain
        for (output,) in (plain[0], plain[2]):
            ended = output[-1] == END
            assert automaton.accepts(output[:-1]) if ended else len(output) == 30
            assert automaton.state_after(output[:-1]) is not None
            assert END not in output[:-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("acceptance", [None, "token", "block", "walk", "traversal", "multi-step", "coupled"])
def test_drawn_drafts_that_know_no_grammar(acceptance: str | None) -> None:
    """What is written is a sentence of the grammar, whatever the rule."""
    probs = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)).softmax(-1)

    def drawn(generator: torch.Generator, sequence: Sequence, num_draft_tokens: int) -> Draft:
        parents = [-1, -1, 0, 1, 2, 2][:num_draft_tokens]
        tokens = torch.multinomial(probs, len(parents), replacement=True, generator=generator)
        draft = Draft(tokens, parents, probs.repeat(len(parents) + 1, 1))
        return draft if draft.depth <= sequence.room else Draft.empty()

    for seed in range(6):
        automaton = random_automaton(seed, VOCAB, end_id=END, density=0.7)
        made = engine(automaton, scripted(seed, drawn), k=6, acceptance=acceptance)
        for (output,) in tokens(made, [SamplingParams(max_tokens=25, grammar=ANY)] * 4):
            assert automaton.accepts(output[:-1]) if output[-1] == END else len(output) == 25


def test_forced_tokens_are_drafts_from_the_grammar() -> None:
    line = {at: {1 + at % 9: at + 1} for at in range(20)}
    automaton = Automaton(line | {20: {}}, frozenset({20}), VOCAB)
    made = engine(automaton, k=6)
    request = made.add([1, 2], SamplingParams(max_tokens=50, grammar=ANY))
    plain = made.add([1, 2], SamplingParams(max_tokens=5, temperature=0))
    last = run(made)
    choice, other = last[request, 0].choice, last[plain, 0].choice
    assert choice is not None and other is not None
    assert choice.token_ids == [1 + at % 9 for at in range(20)] + [END]
    assert choice.stats.sources["grammar"].num_accepted_tokens == choice.stats.num_accepted_tokens == 18
    assert choice.stats.num_forwards == 4  # with the prompt; then three times six and a bonus, the end included
    assert other.token_ids == FakeModel(VOCAB).greedy([1, 2], 5)
    assert other.stats.num_draft_tokens == 0
    assert other.stats.decisions.keys() == {"off: no drafter"} and choice.stats.decisions == {"on: fixed": 3}


class Keeping(FixedPolicy):
    """Keeps so many nodes of each draft, whatever was planned."""

    def __init__(self, kept: int) -> None:
        super().__init__(6)
        self.kept, self.outcomes = kept, list[DraftOutcome]()

    def trim(self, plan: DraftPlan, sequences: Seq[Sequence], drafts: Seq[Draft]) -> DraftPlan:
        return replace(plan, num_draft_tokens=[min(self.kept, len(draft)) for draft in drafts], reason="no gain")

    def observe(self, cost: StepCost, outcomes: Seq[DraftOutcome]) -> None:
        self.outcomes += outcomes


@pytest.mark.parametrize("kept", [0, 1])
def test_the_policy_cuts_drafts_under_a_grammar_but_no_forced_tokens(kept: int) -> None:
    """Forced are two tokens of every four; where the others are free, the drafter is right."""
    edges = {at: {2: at + 1, 3: at + 1} if at % 4 < 2 else {1 + at % 9: at + 1} for at in range(20)}
    automaton, policy = Automaton(edges | {20: {}}, frozenset({20}), VOCAB), Keeping(kept)
    fake: Any = FakeModel(VOCAB, eos_token_ids=[END])
    line = tokens(engine(automaton), [SamplingParams(max_tokens=50, grammar=ANY, temperature=0)])[0][0]
    drafter = Scripted(lambda sequence, k: line[sequence.num_output : sequence.num_output + k])
    made = Engine(fake, drafter, config=EngineConfig(seed=1), policy=policy)
    grammars: Any = automaton
    made.grammars = grammars
    request = made.add(PROMPTS[0], SamplingParams(max_tokens=50, grammar=ANY, temperature=0))
    choice = run(made)[request, 0].choice
    assert choice is not None and choice.token_ids == line
    assert choice.stats.sources["grammar"].num_accepted_tokens > 4
    drafts = [outcome.draft for outcome in policy.outcomes]
    assert max(len(draft) for draft in drafts if SOURCE not in draft.sources) == kept
    assert all(outcome.num_draft_tokens >= len(outcome.draft) for outcome in policy.outcomes)


def test_without_a_grammar_there_is_no_policy() -> None:
    made = engine(random_automaton(0, VOCAB), k="auto")
    assert made._loop.policy is None
    made.add([1, 2], SamplingParams(max_tokens=3, grammar=ANY))
    run(made)
    assert made._loop.policy is None


def test_choices_go_their_own_ways() -> None:
    automaton = random_automaton(4, VOCAB, end_id=END, density=0.9)
    asked = [SamplingParams(max_tokens=20, grammar=ANY, seed=3, n=5)]
    plain = tokens(engine(automaton), asked)
    assert len({tuple(each) for each in plain[0]}) > 1
    assert tokens(engine(automaton, scripted(0, tree), k=5), asked) == plain


def test_the_drafter_is_told_what_was_verified() -> None:
    """`Scripted` compares each step's draft with the tokens that came."""
    drafter = scripted(1, tree)
    tokens(engine(random_automaton(1, VOCAB, end_id=END), drafter, k=6), [SamplingParams(grammar=ANY, max_tokens=40)])
    assert any(step.draft is not None and "grammar" in step.draft.sources for step in drafter.steps)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 5])
def test_a_refused_token_ends_its_choice_and_no_other(kind: str, k: int) -> None:
    edges = {0: {1: 1}, 1: {2: 2}, 2: {3: 3, 4: 3}, 3: {5: 3}}
    automaton = Automaton(edges, frozenset({3}), VOCAB, refused=frozenset({(2, 3), (2, 4)}))
    made = engine(automaton, scripted(0, chain) if k else None, k=k)
    bad = made.add([1], SamplingParams(max_tokens=9, grammar=ANY, **KINDS[kind]), stream=True)
    good = made.add([1], SamplingParams(max_tokens=9, **KINDS[kind]))
    streamed, last = [], {}
    while made.has_work:
        for output in made.step():
            last[output.request_id] = output
            streamed += output.chunk.token_ids if output.request_id == bad else []
    assert isinstance(last[bad].error, GrammarDeadEndError)
    assert streamed[:2] == [1, 2] and streamed[2] in (3, 4)
    assert last[good].error is None
    fake: Any = made.target
    assert all(cache.freed for cache in fake.caches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 5])
def test_an_empty_mask_ends_its_choice(kind: str, k: int) -> None:
    """Here by min_tokens, which holds back the end that the grammar has come to."""
    automaton = Automaton({0: {1: 1}, 1: {2: 2}, 2: {}}, frozenset({2}), VOCAB)
    made = engine(automaton, scripted(0, chain) if k else None, k=k)
    request = made.add([1], SamplingParams(max_tokens=9, min_tokens=5, grammar=ANY, **KINDS[kind]))
    error = run(made)[request, 0].error
    assert isinstance(error, GrammarDeadEndError)
    assert "min_tokens" in str(error)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_what_stands_before_a_dead_end_is_told(count: int) -> None:
    """The same tokens, however many of them were drafted together with what follows; then the error."""
    line = {at: {at + 1: at + 1} for at in range(count)}
    automaton = Automaton(line | {count: {}}, frozenset({count}), VOCAB)
    for k in range(8):
        drafter = Scripted(
            lambda sequence, num_draft_tokens: [*range(sequence.num_output + 1, VOCAB)][:num_draft_tokens]
        )
        made = engine(automaton, drafter, k=k)
        made.add([1], SamplingParams(max_tokens=9, min_tokens=9, grammar=ANY, temperature=0), stream=True)
        outputs = []
        while made.has_work:
            outputs += made.step()
        assert [token_id for output in outputs for token_id in output.chunk.token_ids] == [*range(1, count + 1)]
        assert isinstance(outputs[-1].error, GrammarDeadEndError)
        fake: Any = made.target
        assert all(cache.freed for cache in fake.caches)


def test_bad_logits_are_told_as_such() -> None:
    automaton = random_automaton(0, VOCAB, end_id=END)
    for kind in ("greedy", "seeded"):
        made = engine(automaton)
        fake: Any = made.target
        fake.table[:] = torch.nan
        request = made.add([1, 2], SamplingParams(grammar=ANY, **KINDS[kind]))
        assert isinstance(run(made)[request, 0].error, NonFiniteError)


def test_a_request_that_nothing_could_end_is_refused() -> None:
    made = engine(random_automaton(0, VOCAB))
    with pytest.raises(GrammarError, match="No token ends an answer"):
        made.add([1], SamplingParams(grammar=ANY, ignore_eos=True))
    assert not made.has_work
    made.add([1], SamplingParams(grammar=ANY, ignore_eos=True, stop_token_ids=[9], max_tokens=3))
    run(made)


def test_a_model_without_a_tokenizer() -> None:
    fake: Any = FakeModel(eos_token_ids=[END])
    with pytest.raises(GrammarError, match="no tokenizer"):
        Engine(fake).add([1], SamplingParams(grammar=ANY))


def test_logprobs_are_the_models() -> None:
    """Before any processing, of tokens that the mask has left."""
    automaton = random_automaton(2, VOCAB, end_id=END)
    made = engine(automaton)
    request = made.add([1, 2], SamplingParams(grammar=ANY, temperature=0, max_tokens=4, logprobs=1))
    choice = run(made)[request, 0].choice
    assert choice is not None and choice.logprobs is not None
    fake: Any = made.target
    before = [1, 2]
    for token_id, entry in zip(choice.token_ids, choice.logprobs):
        expected = fake.logits_after(before).log_softmax(-1)
        assert entry.logprob == pytest.approx(float(expected[token_id]))
        before.append(token_id)
