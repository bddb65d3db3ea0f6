"""`forerun bench load`: many requests at once, by the figures that an engine under load is judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from forerun.bench.report import Report, Table
from forerun.cli import options
from forerun.cli.bench.shared import JsonFile, begin, print_report, say, whole_numbers
from forerun.cli.default_model import chosen_model
from forerun.cli.demo import choose_drafters
from forerun.cli.flags import Flags, with_flags
from forerun.cli.memory_line import memory_told
from forerun.cli.options import WORKLOAD_FILE, LLMOptions
from forerun.config import AUTO, DEFAULT_DRAFTER, SamplingParams
from forerun.errors import ConfigError
from forerun.fields import Checked, option
from forerun.files.json_file import Fields
from forerun.results.read import check_version
from forerun.results.write import without_folders
from forerun.workloads import load as load_workload

if TYPE_CHECKING:
    from forerun.bench.load.asks import Ask
    from forerun.engine import LLM

PARTS = ("loop", "batches", "prefix", "arrival", "many", "replay")


@dataclass(frozen=True, slots=True)
class LoadOptions(Checked):
    """What is measured, at what sizes."""

    parts: str = option(",".join(PARTS), f"With commas between them: {', '.join(PARTS)}.", metavar="PART,...")
    drafters: str = option(DEFAULT_DRAFTER, "Drafters that 'auto' runs with.", metavar="DRAFTER,...")
    prompts: str = option("code,prose,copying", f"Bundled workloads, {WORKLOAD_FILE}", metavar="WORKLOAD,...")
    outstanding: str = option("1,2,4,8,16,32", "Outstanding requests, and batch sizes.", metavar="N,...")
    pairs: int = option(8, "Interleaved pairs of plain and auto in the closed loop.", low=1)
    rounds: int = option(3, "Rounds of every other measurement.", low=1)
    prompt_tokens: int = option(256, "Tokens of the longest prompt in the closed loop.", low=1)
    max_tokens: int = option(96, "Tokens of the longest answer in the closed loop, and of each in a batch.", low=4)
    temperature: float = option(0.0, "Of the closed loop's requests; above 0 they carry a seed.", low=0, high=100)
    prefix: int = option(1000, "Tokens of the repeated prefix.", low=1)
    streams: int = option(8, "Streams among which a long prompt arrives.", low=1)
    arriving: int = option(2000, "Tokens of that prompt, fewer where the model's context is shorter.", low=1)
    stream_tokens: int = option(200, "Tokens of each of those streams.", low=8)
    slots: int = option(128, "Sequences at once beside the plain PyTorch loop.", low=1)
    slot_prompt: int = option(60, "Tokens of their prompts.", low=1)
    slot_tokens: int = option(150, "Tokens of their answers.", low=2)
    num_draft_tokens: str = option("1,2,4,8", "Fixed values of K that are replayed beside auto.", metavar="K,...")
    context: int = option(128, "Cached positions of each sequence at which a replay's forwards are timed.", low=1)
    costs: Path | None = option(
        None,
        "Replay by the costs in these results of `forerun bench load --json FILE`.",
        metavar="FILE",
        default_text="measured now",
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """What the parts are measured with.

    Attributes:
        model: its name.
        plain: an engine of the target alone.
        chosen: name -> the text of every drafter.
        texts: prompts in token ids.
        asked: the options.
        counts: numbers of outstanding requests, and batch sizes.
        dtype: of the weights.
    """

    model: str
    plain: LLM
    chosen: Mapping[str, str]
    texts: Sequence[Sequence[int]]
    asked: LoadOptions
    counts: Sequence[int]
    dtype: str

    @property
    def params(self) -> SamplingParams:
        """Of the closed loop's requests."""
        seed = 1 if self.asked.temperature else None
        return SamplingParams(temperature=self.asked.temperature, ignore_eos=True, seed=seed)

    @property
    def asks(self) -> list[Ask]:
        """The closed loop's requests."""
        from forerun.bench.load.asks import mixed

        return mixed(self.texts, self.asked.prompt_tokens, self.asked.max_tokens)

    def pieces(self, length: int, count: int) -> list[list[int]]:
        """Prompts of one length."""
        from forerun.bench.load.asks import slices

        return slices([token_id for text in self.texts for token_id in text], length, count)

    def engine(self, drafter: str | None, max_batch: int) -> LLM:
        """An engine over the loaded target."""
        from forerun.engine import LLM

        plain = self.plain
        return LLM(plain.target, drafter=drafter, tokenizer=plain.tokenizer, seed=0, max_batch=max_batch)


Measured = tuple[Any, Table]
"""Rows for JSON, and their table."""


@with_flags
def load(
    *,
    model: options.ModelName = None,
    draft: options.DraftName = None,
    asked: Annotated[LoadOptions, Flags()],
    llm: Annotated[LLMOptions, Flags("dtype", "quantize")],
    threads: options.Threads = None,
    json: JsonFile = None,
    markdown: options.Markdown = False,
) -> None:
    """Many requests at once: closed loops, batches, prefixes, arrivals, many slots, and replays of them."""
    parts, counts = chosen_parts(asked.parts), whole_numbers(asked.outstanding, "--outstanding")
    cases = [case for name in options.comma_list(asked.prompts, "--prompts") for case in load_workload(name)]
    model = chosen_model(model)
    chosen = choose_drafters(model, draft, asked.drafters)
    watch = begin(threads, json)
    from forerun.bench.prompts import prepare
    from forerun.bench.recorded import drafter_facts, target_facts
    from forerun.bench.recorded_parts import load_figures
    from forerun.bench.reference import quieten
    from forerun.engine import LLM
    from forerun.models import number_format

    quieten()
    say(f"loading {model}")
    with memory_told(say):
        plain = LLM(model, drafter=None, dtype=llm.dtype, quantize=llm.quantize, max_batch=max(counts))
    texts = [each.token_ids for each in prepare(plain, {"": cases}, 1)[""]]
    bench = Bench(model, plain, chosen, texts, asked, counts, llm.dtype)
    measured = {part: _MEASURES[part](bench) for part in parts}
    about = f"{without_folders(model)}, {number_format(plain.target)}: "
    tables = [Table(about + table.title, table.header, table.rows) for _, table in measured.values()]
    found = {part: rows for part, (rows, _) in measured.items()}
    report = Report(
        "load",
        tables,
        target_facts(model, plain.target),
        drafter_facts(chosen, [AUTO]),
        {"parts": parts, "outstanding": counts, "pairs": asked.pairs, "rounds": asked.rounds},
        figures=[each for part, rows in found.items() for each in load_figures(part, rows, asked.pairs, asked.rounds)],
        details={"replay": found["replay"]} if "replay" in found else {},
    )
    print_report(report, watch, json, markdown)


def _costs(path: Path) -> Fields:
    """The costs in results of an earlier run. Raises ConfigError."""
    found = Fields.read(path, ConfigError)
    check_version(found)
    return found.fields("details").fields("replay").fields("costs")


def chosen_parts(text: str) -> list[str]:
    """The parts to measure. Raises ConfigError where one of them does not exist."""
    wanted = options.comma_list(text, "--parts")
    odd = [part for part in wanted if part not in PARTS]
    if odd:
        raise ConfigError(f"--parts has {odd[0]!r}, but the parts are {', '.join(PARTS)}.")
    return wanted


def measure_loop(bench: Bench) -> Measured:
    """Plain decoding and auto in a closed loop."""
    from forerun.bench.load import loop

    arms = {loop.PLAIN: bench.plain}
    arms |= {f"auto, {name}": bench.engine(spec, max(bench.counts)) for name, spec in bench.chosen.items()}
    asks, pairs = bench.asks, bench.asked.pairs
    rows = loop.measure(arms, asks, bench.params, bench.counts, pairs, say)
    longest = max(len(ask.token_ids) for ask in asks)
    title = f"closed loop, prompts up to {longest} tokens, answers up to {bench.asked.max_tokens}, {pairs} pairs"
    return rows, Table.of(title, loop.COLUMNS, rows)


def measure_batches(bench: Bench) -> Measured:
    """Plain decoding by batch size."""
    from forerun.bench.load import batches

    prompts = bench.pieces(min(64, bench.asked.prompt_tokens), max(bench.counts))
    rows = batches.measure(bench.plain, prompts, bench.counts, bench.asked.max_tokens, bench.asked.rounds, say)
    title = f"plain decoding by batch size, after prompts of {len(prompts[0])} tokens"
    return rows, Table.of(title, batches.COLUMNS, rows)


def measure_prefix(bench: Bench) -> Measured:
    """A repeated prefix."""
    from forerun.bench.load import prefix

    count = bench.asked.rounds + 1
    prefixes = bench.pieces(bench.asked.prefix, count)
    rows = prefix.measure(bench.plain, prefixes, bench.pieces(prefix.TAIL, 2 * count), say)
    return rows, Table.of("time to the first token after a repeated prefix", prefix.COLUMNS, rows)


def measure_arrival(bench: Bench) -> Measured:
    """A long prompt among streams."""
    from forerun.bench.load import arrival

    asked = bench.asked
    length = min(asked.arriving, bench.plain.target.context_length - arrival.ANSWER)
    long = bench.pieces(length, asked.rounds + 1)
    prompts = bench.pieces(min(64, asked.prompt_tokens), asked.streams)
    rows = arrival.measure(bench.engine(None, asked.streams + 1), prompts, long, asked.stream_tokens, say)
    return rows, Table.of("time between tokens while a long prompt arrives", arrival.COLUMNS, rows)


def measure_many(bench: Bench) -> Measured:
    """Many sequences beside a plain PyTorch loop."""
    from forerun.bench.load import many
    from forerun.bench.slots_reference import SlotsReference

    asked = bench.asked
    prompts = bench.pieces(asked.slot_prompt, asked.slots)
    reference = SlotsReference(bench.model, asked.slots, asked.slot_prompt + asked.slot_tokens, bench.dtype)
    check = many.check(reference, bench.plain.target, prompts)
    engines = {"plain": bench.engine(None, asked.slots)}
    engines |= {f"auto, {name}": bench.engine(spec, asked.slots) for name, spec in bench.chosen.items()}
    rows = many.measure(engines, reference, prompts, asked.slot_tokens, asked.rounds, say)
    title = (
        f"{asked.slots} sequences at once, prompts of {asked.slot_prompt} tokens and answers of {asked.slot_tokens}; "
        f"the loop's logits differ by {check.difference:.3f} standard deviations from the model's, "
        f"{100 * check.same_token:.0f} % of its first tokens are the same"
    )
    return {"rows": rows, "check": check}, Table.of(title, many.COLUMNS, rows)


def measure_replay(bench: Bench) -> Measured:
    """Replays of the closed loop by measured costs."""
    from forerun.bench.load import replay, replay_costs
    from forerun.bench.replay import fresh

    asked, most = bench.asked, max(bench.counts)
    counts = whole_numbers(asked.num_draft_tokens, "--num-draft-tokens")
    given = None if asked.costs is None else _costs(asked.costs)
    batches = sorted({1, *(each for each in bench.counts if each in (4, 8, 16, 32)), most})
    if given is None:
        say("timing forwards")
        target = replay_costs.target_costs(bench.plain.target, batches, asked.context, asked.rounds)
    else:
        target = replay_costs.TargetCosts.read(given.fields("target").values)
    rows, costs = [], {}
    for name, spec in bench.chosen.items():
        make = partial(fresh, bench.plain, spec)
        if given is None:
            say(f"timing {name}")
            prompts = bench.pieces(min(64, asked.prompt_tokens), most)
            costs[name] = replay_costs.drafter_costs(bench.plain, make, batches, prompts, replay.TIMED_TOKENS)
        else:
            costs[name] = replay_costs.DrafterCosts.read(given.fields("drafters").fields(name).values)
        priced = replay.Priced(bench.plain, make, target, costs[name])
        rows += replay.measure(priced, name, bench.asks, bench.params, bench.counts, counts, say)
    facts = {"rows": rows, "costs": {"target": target, "drafters": costs}}
    return facts, Table.of("replay of the closed loop by measured costs", replay.COLUMNS, rows)


_MEASURES: Mapping[str, Callable[[Bench], Measured]] = {
    "loop": measure_loop,
    "batches": measure_batches,
    "prefix": measure_prefix,
    "arrival": measure_arrival,
    "many": measure_many,
    "replay": measure_replay,
}
