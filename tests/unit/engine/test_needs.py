"""What a drafter is told of the target's rows: each row stands after the token that it says it does."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from doubles import FakeModel, Scripted
from forerun.config import EngineConfig, SamplingParams
from forerun.engine import Engine, StepOutput
from forerun.errors import DrafterError
from forerun.types import Draft, Needs, Sequence, Step

GREEDY = SamplingParams(temperature=0, max_tokens=14)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 1], [3, 3], [2, 9, 4, 4, 1, 0, 7, 7, 3]]


def run(engine: Engine) -> dict[tuple[int, int], StepOutput]:
    """The last output of every choice, by request id and index."""
    last: dict[tuple[int, int], StepOutput] = {}
    while engine.has_work:
        last |= {(output.request_id, output.chunk.index): output for output in engine.step()}
    return last


def tokens(output: StepOutput) -> list[int]:
    assert output.choice is not None
    return output.choice.token_ids


class Curious(Scripted):
    """Proposes random trees with right nodes and probes among them, and checks every row it is told of."""

    def __init__(self, fake: FakeModel, needs: Needs, seed: int = 0) -> None:
        super().__init__(self.tree)
        self.fake, self.needs, self.rng = fake, needs, random.Random(seed)
        self.asked: dict[int, tuple[Draft, list[int]]] = {}
        self.num_told: dict[int, int] = {}
        self.num_accepted = 0

    def tree(self, sequence: Sequence, num_draft_tokens: int) -> Draft:
        token_ids: list[int] = []
        parents: list[int] = []
        paths: list[list[int]] = [[]]
        for _ in range(self.rng.randint(0, num_draft_tokens)):
            parent = self.rng.choice([row for row, path in enumerate(paths) if len(path) < sequence.room]) - 1
            above = paths[parent + 1]
            right = int(self.fake.logits_after([*sequence.token_ids, *above]).argmax())
            token_ids.append(self.rng.choice([right, self.rng.randrange(self.fake.vocab_size)]))
            parents.append(parent)
            paths.append([*above, token_ids[-1]])
        n = len(token_ids)
        sources = tuple(self.rng.choice("ab") for _ in range(n))
        draft = Draft(token_ids, parents)
        draft = replace(draft, num_candidates=self.rng.randint(0, n), sources=sources)
        self.asked[sequence.id] = (draft, list(sequence.token_ids))
        return draft

    def start(self, sequence: Sequence) -> None:
        super().start(sequence)
        assert sequence.cache is not None
        self.num_told[sequence.id] = sequence.cache.length  # of what is taken over nothing is told

    def commit(self, steps: list[Step]) -> None:
        super().commit(steps)
        for step in steps:
            self.check(step)

    def check(self, step: Step) -> None:
        """Rows beyond the draft's follow the prompt; row -(n + 1) follows the last token before the draft."""
        sequence, told = step.sequence, step.top_tokens
        told_before = self.num_told[sequence.id]
        contexts: list[list[int]] = []
        draft, before = self.asked.pop(sequence.id, (None, []))
        if step.draft is None or step.verdict is None:
            assert draft is None
            before, n = sequence.token_ids[: step.num_computed], 0
        else:
            n = len(step.draft)
            if n == 0:
                before = sequence.token_ids[: step.num_computed]
            else:
                assert step.draft is draft
                self.num_accepted += len(step.verdict.path)
                assert all(node < step.draft.num_candidates for node in step.verdict.path)
        rows = 0 if told is None else len(told)
        own = rows - n
        if step.draft is not None and n == 0:
            before = sequence.token_ids[: len(sequence.token_ids) - 1]
        contexts = [before[: len(before) - own + 1 + row] for row in range(own)]
        if step.draft is not None:
            assert own >= 1
            paths = [before]
            for token_id, parent in zip(step.draft.ids, step.draft.parents, strict=True):
                paths.append([*paths[parent + 1], token_id])
            contexts += paths[1:]
        if self.needs.prompt_rows and told_before < sequence.num_prompt:
            assert own == len(before) - told_before
        elif step.draft is None:
            assert told is None
        else:
            assert own == 1
        self.num_told[sequence.id] = len(before)
        for row, context in enumerate(contexts):
            logits = self.fake.logits_after(context)
            expected = logits.sort(descending=True, stable=True).indices[: self.needs.top_tokens]
            assert told is not None and told[row].tolist() == expected.tolist()


CASES = [
    (Needs(1), {}),
    (Needs(3), {}),
    (Needs(8, prompt_rows=True), {}),
    (Needs(1, prompt_rows=True), {"prompt_logprobs": 1}),
    (Needs(2, prompt_rows=True), {"prompt_logprobs": 0, "logprobs": 2}),
    (Needs(99, prompt_rows=True), {}),
    (Needs(4, prompt_rows=True), {"temperature": 1.5, "top_k": 3, "seed": 2, "n": 2}),
    (Needs(4, prompt_rows=True), {"repetition_penalty": 1.5, "logit_bias": {3: 4.0}}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("chunk", [1, 2, 3, 256])
@pytest.mark.parametrize(("needs", "options"), CASES)
def test_every_row_follows_its_tokens(needs: Needs, options: dict[str, Any], chunk: int) -> None:
    """Prompt chunks, final chunks, drafts, probes, a batch whose members stand at different places."""
    fake = FakeModel()
    params = replace(GREEDY, **options)
    config = EngineConfig(num_draft_tokens=6, prefill_chunk=chunk, max_batch=3, seed=0)
    curious = Curious(fake, needs)
    engine = Engine(fake, curious, config=config)
    plain = Engine(fake, None, config=config)
    ids = [engine.add(prompt, params) for prompt in PROMPTS], [plain.add(prompt, params) for prompt in PROMPTS]
    told, reference = run(engine), run(plain)
    assert curious.num_accepted > 10
    for ours, theirs in zip(*ids):
        for choice in range(params.n):
            output, other = told[ours, choice], reference[theirs, choice]
            assert tokens(output) == tokens(other)
            assert output.choice.logprobs == other.choice.logprobs
            assert output.prompt_logprobs == other.prompt_logprobs


def test_prompt_rows_alone_ask_for_nothing() -> None:
    """Logits that nobody looks at are not computed."""
    for needs, widths in ((Needs(0, prompt_rows=True), [0, 0, 1]), (Needs(2), [0, 0, 1]), (Needs(2, True), [3, 3, 1])):
        fake = FakeModel()
        seen: list[int | None] = []
        fake.before_forward = lambda batch, seen=seen: seen.append(batch[0].num_logits)
        drafter = Scripted(lambda *_: [])
        drafter.needs = needs
        engine = Engine(fake, drafter, config=EngineConfig(prefill_chunk=3))
        engine.add(PROMPTS[2], GREEDY)
        run(engine)
        assert seen[:3] == widths
        assert all((step.top_tokens is None) == (needs.top_tokens == 0) for step in drafter.steps[3:])


def test_sources_are_counted_without_probes_and_as_committed() -> None:
    fake = FakeModel()
    right = fake.greedy(PROMPTS[0], 14)

    def propose(sequence: Sequence, num_draft_tokens: int) -> Draft:
        """The right token from "a", a wrong sibling from "b", the right next ones from "b"; a probe from "c"."""
        first, *more = right[sequence.num_output :][: num_draft_tokens - 2]
        token_ids = [first, (first + 1) % 11, *more, 0]
        parents = [-1, -1, *([0, *range(2, 1 + len(more))] if more else []), 0]
        if not more:
            token_ids, parents = token_ids[:-1], parents[:-1]
            return Draft(token_ids, parents, sources=("a", "b"))
        draft = Draft(token_ids, parents, num_candidates=len(token_ids) - 1)
        return replace(draft, sources=("a", *("b" for _ in token_ids[2:]), "c"))

    engine = Engine(fake, Scripted(propose), config=EngineConfig(num_draft_tokens=5))
    engine.add(PROMPTS[0], replace(GREEDY, stop_token_ids=(right[5],)))
    output = run(engine)[0, 0]
    assert output.choice is not None
    stats = output.choice.stats
    assert tokens(output) == right[: right.index(right[5]) + 1]
    assert stats.sources.keys() == {"a", "b"}
    assert sum(each.num_draft_tokens for each in stats.sources.values()) == stats.num_draft_tokens
    assert sum(each.num_accepted_tokens for each in stats.sources.values()) == stats.num_accepted_tokens
    assert stats.sources["a"].num_accepted_tokens == stats.sources["a"].num_draft_tokens >= 1
    assert 0 < stats.sources["b"].num_accepted_tokens < stats.sources["b"].num_draft_tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sources": ("a",)}, "1 sources for 2 tokens"),
        ({"num_candidates": 3}, "3 candidates among 2 tokens"),
    ],
)
def test_broken_drafts_end_their_own_sequence(change: dict[str, Any], words: str) -> None:
    fake = FakeModel()

    def propose(sequence: Sequence, num_draft_tokens: int) -> Draft:
        draft = Draft.chain([1, 2][:num_draft_tokens])
        return replace(draft, **change) if sequence.token_ids[0] == 1 and len(draft) == 2 else draft

    engine = Engine(fake, Scripted(propose), config=EngineConfig(num_draft_tokens=5))
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS[:2]]
    last = run(engine)
    assert isinstance(last[ids[0], 0].error, DrafterError) and words in str(last[ids[0], 0].error)
    assert tokens(last[ids[1], 0]) == fake.greedy(PROMPTS[1], 14)
