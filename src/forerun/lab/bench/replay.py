"""Fixed K against "auto" without a clock: real drafts and verdicts, priced by measured costs of a step's parts.

Wall-clock differences of a few per cent are smaller than the noise of a shared machine. These runs are deterministic
(`priced_run`), and differ in nothing but K. Requests have seeds, so that every run writes the same text.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from forerun.config import AUTO, HYBRID_SOURCES, SamplingParams
from forerun.drafters import Binding, Drafter, make_drafter
from forerun.drafters.hybrid.hybrid import Hybrid
from forerun.drafters.parse_text import source_texts, split_spec
from forerun.engine import LLM
from forerun.engine.step_times import CALIBRATION_PROMPT, time_drafts
from forerun.lab.bench.methods import with_prediction
from forerun.lab.bench.priced_run import PricedRun, Setting, priced_run
from forerun.lab.bench.prompts import BenchPrompt
from forerun.lab.bench.tables import Columns, percent
from forerun.models import LanguageModel, Rows
from forerun.speculation import CostModel, FixedPolicy
from forerun.speculation.cost_model import COST_TRUSTED, KINDS

HYBRID = "hybrid"
TEMPERATURES = (0.0, 1.0)
"""Of a workload whose cases have none."""
ROWS = (1, 2, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Rows of a forward at which the target is timed; times between them are interpolated."""
MIN_SAMPLES = 2
"""Samples that a count needs for its median to be a point of the curve."""


@dataclass(frozen=True, slots=True)
class MedianCurve:
    """Seconds as a function of a count: linear between the points, constant beyond them."""

    counts: Sequence[float]
    seconds: Sequence[float]

    def __call__(self, count: float) -> float:
        return float(np.interp(count, self.counts, self.seconds))

    @classmethod
    def of_medians(cls, samples: Mapping[int, Sequence[float]]) -> MedianCurve:
        """Make a curve through the medians of counts with MIN_SAMPLES samples; of all counts, if none has so many."""
        kept = {count: seconds for count, seconds in samples.items() if len(seconds) >= MIN_SAMPLES} or samples
        if not kept:
            return cls([0], [0.0])
        counts = sorted(kept)
        return cls(counts, [statistics.median(kept[count]) for count in counts])


def target_costs(model: LanguageModel, context: int, rounds: int, rows: Sequence[int] = ROWS) -> MedianCurve:
    """Measure the seconds of a forward by its rows, after `context` cached positions: medians of interleaved rounds."""
    cache = model.new_cache()
    filler = [i % model.vocab_size for i in range(max(context, *rows))]
    model.forward([Rows(cache, filler[:context], num_logits=1)])
    cache.commit(range(context))
    samples: dict[int, list[float]] = defaultdict(list)
    for count in [*rows] * (rounds + 1):
        start = perf_counter()
        model.forward([Rows(cache, filler[:count])])
        samples[count].append(perf_counter() - start)
        cache.drop()
    cache.free()
    return MedianCurve.of_medians({count: seconds[1:] for count, seconds in samples.items()})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One drafter on one workload.

    Attributes:
        workload: workload, temperature and drafter, for people.
        fixed: one entry per K.
        auto: K chosen automatically.
        plain: tokens per second of plain decoding.
    """

    workload: str
    fixed: list[PricedRun]
    auto: PricedRun
    plain: float

    @property
    def best(self) -> PricedRun:
        """Return the fastest of the fixed choices, plain decoding included."""
        plain = PricedRun("plain", self.plain, 1.0, 0.0, 1.0)
        return max([plain, *self.fixed], key=lambda each: each.tokens_per_second)

    @property
    def best_over_plain(self) -> float:
        """Return the best fixed choice's speed over plain decoding's."""
        return self.best.tokens_per_second / self.plain

    @property
    def auto_over_plain(self) -> float:
        """Return auto's speed over plain decoding's."""
        return self.auto.tokens_per_second / self.plain

    @property
    def auto_over_best(self) -> float:
        """Return auto's speed over the best fixed choice's."""
        return self.auto.tokens_per_second / self.best.tokens_per_second


COLUMNS: Columns[Comparison] = {
    "workload, temperature, drafter": lambda row: row.workload,
    "best K": lambda row: row.best.name,
    "over plain": lambda row: f"{row.best_over_plain:.2f}",
    "auto over plain": lambda row: f"{row.auto_over_plain:.2f}",
    "auto / best": lambda row: f"{row.auto_over_best:.3f}",
    "length": lambda row: f"{row.auto.mean_acceptance_length:.2f}",
    "idle": lambda row: percent(row.auto.idle),
}


def replay_drafters(
    plain: LLM,
    drafters: Mapping[str, str],
    target: MedianCurve,
    prompts: Mapping[str, Sequence[BenchPrompt]],
    temperatures: Mapping[str, Sequence[float]],
    counts: Sequence[int],
    max_tokens: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Comparison]:
    """Replay every drafter on every workload and temperature.

    Args:
        plain: an engine of the target alone.
        drafters: name -> the drafter's text.
        target: seconds of the target's forward, by rows.
        prompts: by workload.
        temperatures: the temperatures of each workload; none stands for TEMPERATURES.
        counts: the fixed values of K.
    """
    rows = []
    for name, spec in drafters.items():
        reader = fresh(plain, spec)
        echo = not (reader.needs.rows or reader.traits.writes_cache)
        setting = replace(timed_setting(plain, spec, target, say), echo=echo)
        for workload, requests in prompts.items():
            for temperature in temperatures[workload] or TEMPERATURES:
                say(f"replaying {name} on {workload} at temperature {temperature:g}")
                one = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
                params = [with_prediction(replace(one, seed=i), reader, each) for i, each in enumerate(requests)]
                ids = [each.token_ids for each in requests]
                rows.append(replay_counts(setting, f"{workload}, {temperature:g}, {name}", ids, params, counts))
    return rows


def replay_counts(
    setting: Setting,
    label: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    counts: Sequence[int],
) -> Comparison:
    """Replay every K of `counts`, and auto, which begins with what was measured."""
    texts = _answered_prompts(setting.plain, prompts, params) if setting.echo else []
    runs = [priced_run(setting, FixedPolicy(k), f"K={k}", prompts, params, texts) for k in counts]
    policy = setting.make().traits.automatic_policy(CostModel.restored(setting.costs.state()))
    return Comparison(label, runs, priced_run(setting, policy, AUTO, prompts, params, texts), setting.plain_speed)


def replayed_costs(target: LanguageModel, drafter: Drafter, forwards: MedianCurve) -> CostModel:
    """Measure what a drafter's steps cost beside forwards whose times are known, by rows."""
    costs = CostModel()
    drafting = CostModel()
    rest = statistics.median(time_drafts(target, drafter, drafting, CALIBRATION_PROMPT))
    costs.take_drafts(drafting)
    for count in map(int, forwards.counts):
        costs.add_target(KINDS[0], 1, 0, count, forwards(count) + rest, COST_TRUSTED)
    return costs


def timed_setting(plain: LLM, spec: str, target: MedianCurve, say: Callable[[str], None]) -> Setting:
    """Measure a drafter's costs, or those of a hybrid's sources, and return its setting."""
    costs = {}
    for source in sources_of(spec):
        say(f"timing {source}")
        costs[source] = replayed_costs(plain.target, fresh(plain, source), target)

    def make() -> Drafter:
        drafter = fresh(plain, spec)
        if isinstance(drafter, Hybrid):
            drafter.use_costs(costs)
        return drafter

    return Setting(plain, make, costs[sources_of(spec)[0]])


def _answered_prompts(
    plain: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    """Return prompts with the target's answers; predictions, which alter nothing, are left out."""
    without = [replace(each, prediction=None) for each in params]
    generations: Any = plain.generate([list(prompt) for prompt in prompts], without)
    return [[*prompt, *each.token_ids] for prompt, each in zip(prompts, generations, strict=True)]


def sources_of(spec: str) -> list[str]:
    """Return the drafters of a hybrid's text; of any other drafter's text, the text."""
    name, options = split_spec(spec)
    return [spec] if name != HYBRID else source_texts(options.get("sources", HYBRID_SOURCES))


def fresh(plain: LLM, spec: str) -> Drafter:
    """Create a drafter for the target of `plain`, with its draws seeded."""
    return make_drafter(spec, Binding(plain.target, plain.tokenizer, 1))[0]
