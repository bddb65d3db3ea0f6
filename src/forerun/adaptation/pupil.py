"""What drafts for one tenant: its copy that learns, step by step, whether it is better beyond chance however often that
is asked, and what was swapped."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass
from math import erfc, inf, log1p, sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.adaptation.learners import Learner
from forerun.adaptation.ring import Excerpt
from forerun.drafters.base import Adaptable

_log = logging.getLogger(__name__)
RATE = 3e-4
"""Of AdamW, a tenth of what training begins with."""
CLIP = 1.0
STEP_TOKENS = 256
"""Verified tokens of a step, at least."""
PASSES = 2.0
"""Times that a round reads what has come since the last one; as many older tokens are read beside."""
BLOCK = 16
"""Positions in a row whose mean is one observation: chains that begin side by side share tokens."""
LEAST_BLOCKS = 8
"""Observations without which nothing is decided."""
CHANCE = 0.05
"""Probability that a drafter which is no better is ever taken for better, in all looks at it together."""


@dataclass(slots=True)
class Progress:
    """What has come of a tenant's learning.

    Attributes:
        tokens: verified tokens that have come.
        rounds, steps: of learning: each round ends with a judgement.
        swaps: times that a copy was swapped in. swaps_back: that the original came back.
        is_adapted: a copy drafts.
        judged: tokens in a draft of DEPTH + 1 at the last judgement, by what was judged: "original", the "serving" one
            where that is a copy, and the "copy" that learns.
        before, after: of those, at the last swap: of what drafted, and of what drafts since.
    """

    tokens: int = 0
    rounds: int = 0
    steps: int = 0
    swaps: int = 0
    swaps_back: int = 0
    is_adapted: bool = False
    judged: Mapping[str, float] | None = None
    before: float = 0.0
    after: float = 0.0


class Pupil:
    """A tenant's copy. One thread calls it.

    Args:
        original: the tensors as they were loaded.
        serving: those of a copy that drafts already; None: the original does.
        makes_way: called between any two operations of torch while it learns or is judged, and may wait.

    Attributes:
        progress: of its learning.
        serving: as the argument.
    """

    def __init__(
        self,
        tenant: str | None,
        adaptable: Adaptable,
        learner: Learner,
        original: Mapping[str, Tensor],
        serving: Mapping[str, Tensor] | None = None,
        *,
        makes_way: Callable[[], object],
    ) -> None:
        self._tenant = tenant
        self._adaptable = adaptable
        self._learner = learner
        self._original = original
        self._makes_way = makes_way
        self.serving = serving
        self.progress = Progress(is_adapted=serving is not None)
        self._random = random.Random(0)
        self._since = 0  # tokens that had come when the last round began
        self._looked = 0  # and when it was judged last
        self._looks = 0  # judgements of what drafts
        self._begin(original if serving is None else serving)

    def _begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the copy that learns begin with these tensors."""
        self.module = self._learner.module({name: tensor.clone() for name, tensor in tensors.items()})
        self._optimiser = torch.optim.AdamW(self.module.parameters(), lr=RATE, weight_decay=0.0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the copy that learns."""
        return self._learner.parameters(self.module)

    def round(self, older: Seq[Excerpt], newest: Seq[Excerpt], num_seen: int) -> Iterator[None]:
        """Learn from the older segments, judge by the newest, and swap. Yields after each piece of work.

        num_seen: tokens that have come so far.
        """
        progress = self.progress
        progress.tokens = num_seen
        new = num_seen - self._since
        self._since = num_seen
        for segments in self._batches(older, new):
            yield from self._step(segments)
        progress.rounds += 1
        if num_seen - self._looked >= sum(each.num_tokens for each in newest):  # none has judged before
            self._looked = num_seen
            yield from self._judge(newest)

    def _batches(self, older: Seq[Excerpt], new: int) -> Iterator[list[Excerpt]]:
        """Yield the segments of each step: of the newest of these, which hold `new` tokens, and as many of all."""
        recent: list[Excerpt] = []
        for segment in reversed(older):
            if sum(each.num_tokens for each in recent) >= new:
                break
            recent.append(segment)
        tokens = int(PASSES * sum(each.num_tokens for each in recent))
        batch: list[Excerpt] = []
        while tokens > 0:
            for pool in (recent, older):
                segment = self._random.choice(pool)
                batch.append(segment)
            tokens -= batch[-2].num_tokens
            if sum(each.num_tokens for each in batch) >= STEP_TOKENS:
                yield batch
                batch = []

    def _step(self, segments: Seq[Excerpt]) -> Iterator[None]:
        total = sum(each.num_tokens for each in segments)
        for segment in segments:
            with _BetweenOperations(self._makes_way):
                (self._learner.loss(self.module, segment) / total).backward()  # type: ignore[no-untyped-call]
            yield
        nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.progress.steps += 1
        yield

    def _judge(self, segments: Seq[Excerpt]) -> Iterator[None]:
        """Compare original, what drafts and the copy by segments that none has learnt from, and swap."""
        modules = {"original": self._learner.module(self._original), "copy": self.module}
        if self.serving is not None:
            modules["serving"] = self._learner.module(self.serving)
        accepted: dict[str, list[Tensor]] = {name: [] for name in modules}
        for segment in segments:
            for name, module in modules.items():
                with _BetweenOperations(self._makes_way):
                    accepted[name].append(self._learner.accepted(module, segment))
                yield
        found = {name: torch.cat(each) if each else torch.zeros(0) for name, each in accepted.items()}
        self.progress.judged = {
            name: round(1 + float(each.double().mean()), 4) for name, each in found.items() if len(each)
        }
        drafts = found.get("serving", found["original"])
        self._looks += 1
        if self.serving is not None and gain(found["original"], drafts).is_beyond_chance(self._looks):
            self._swap(None, drafts, found["original"])
        elif gain(found["copy"], drafts).is_beyond_chance(self._looks):
            self._swap(self.tensors(), drafts, found["copy"])
        elif gain(drafts, found["copy"]).is_beyond_chance(1):  # nothing is swapped: no look is spent
            self._begin(self._original if self.serving is None else self.serving)
        yield

    def _swap(self, tensors: Mapping[str, Tensor] | None, before: Tensor, after: Tensor) -> None:
        progress = self.progress
        self._adaptable.swap(self._tenant, tensors)
        self.serving = tensors
        self._looks = 0  # another question
        progress.is_adapted = tensors is not None
        progress.swaps += tensors is not None
        progress.swaps_back += tensors is None
        progress.before = round(1 + float(before.double().mean()), 4)
        progress.after = round(1 + float(after.double().mean()), 4)
        if tensors is None:
            self._begin(self._original)
        _log.info(
            "%s %s for tenant %d of this server: %.2f tokens a draft before, %.2f after, of %d judged",
            *(self._adaptable.name, "is back as it was loaded" if tensors is None else "was swapped for its copy"),
            *(hash(self._tenant) % 1000, progress.before, progress.after, len(after)),
        )


class _BetweenOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls something before each operation of torch in this thread, those of backward passes included.

    A piece of work takes a second with a large head, beside which no request should be computed. Swaps are none: they
    pack weights, under a lock for which others would wait.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._call()
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Gain:
    """What one drafter accepts more than another, in tokens a draft.

    Attributes:
        mean: over blocks. error: its standard error.
        blocks: how many there were.
    """

    mean: float
    error: float
    blocks: int

    @property
    def chance(self) -> float:
        """Return the probability of such a gain, or a larger one, by chance (Student's t, one-sided)."""
        if self.blocks < LEAST_BLOCKS or self.mean <= 0:
            return 1.0
        t = self.mean / self.error if self.error else inf
        free = self.blocks - 1
        # Wallace (1959): the normal deviate of the same tail, to three digits far beyond those that looks ask for
        normal = (8 * free + 1) / (8 * free + 3) * sqrt(free * log1p(t * t / free))
        return erfc(normal / sqrt(2)) / 2

    def is_beyond_chance(self, look: int) -> bool:
        """Return whether there is a gain beyond chance, at the nth look, from 1 on, for one. The looks share CHANCE as
        1/2, 1/6, 1/12...: their sum is 1 whatever their number, and they need not be independent."""
        return self.chance < CHANCE / (look * (look + 1))


def gain(ours: Tensor, theirs: Tensor) -> Gain:
    """Compare two drafters position by position, paired.

    ours, theirs: [n] accepted tokens of the draft that begins at each of the same positions, in order.
    """
    blocks = len(ours) // BLOCK
    if blocks < 2:
        return Gain(0.0, 0.0, blocks)
    difference = (ours - theirs)[: blocks * BLOCK].double().view(blocks, BLOCK).mean(1)
    rest = difference - difference.mean()
    # Blocks of one text are alike: what neighbours have in common widens the error, and never narrows it.
    shared = max(0.0, float((rest[1:] * rest[:-1]).sum()))
    error = sqrt((float(rest.square().sum()) + 2 * shared) / (blocks - 1) / blocks)
    return Gain(float(difference.mean()), error, blocks)
