"""The training of a head of any kind: from data and a target to a head's folder with its card."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from forerun.config import SamplingParams
from forerun.drafters import Binding, Drafter
from forerun.heads import StoredHead, save_head
from forerun.heads.fingerprint import target_fingerprint
from forerun.models import LanguageModel, load_model, number_format
from forerun.plan.predictor import StepCosts
from forerun.plan.step_times import step_costs
from forerun.train.accelerator import device_name, reuse_memory, training_device
from forerun.train.checkpoint import METRICS, run_in
from forerun.train.data.answer_rows import read_rows, tokenizer_of
from forerun.train.data.packed import PackedRows
from forerun.train.heads.card import HeadReport, build_record, write_card
from forerun.train.heads.evaluate import HeldOut, shown
from forerun.train.heads.kind import HeadKind
from forerun.train.heads.module import HeadModule
from forerun.train.heads.run import Target, frozen_model, train
from forerun.train.heads.start import draft_vocabulary, offsets, token_counts
from forerun.train.heads.target_states import check_states

FINAL_ROWS = 400
"""Held-out rows of the evaluation that goes to the card, at most."""
_FIRST_ROWS = 4
"""Rows whose states the first weights follow."""


@dataclass(frozen=True, slots=True)
class Start:
    """A run before its first step.

    Attributes:
        vocabulary: [V] ids of the target's tokens that the head proposes.
        coverage: their share of the training tokens.
    """

    served: LanguageModel
    target: Target
    rows: PackedRows
    head: HeadModule
    vocabulary: Tensor
    coverage: float
    kind: HeadKind[Any]


def train_head(
    out: Path,
    work: Path,
    name: str,
    data: Path,
    kind: HeadKind[Any],
    command: str,
    *,
    resume: bool,
    force: bool,
) -> None:
    """Train a head, save it to `out`, measure it on held-out answers, write the card.

    Args:
        name: of the target, as `load_model` takes it.
        data: see `read_rows`.
        command: the command line, for the card.
    """
    console, options = Console(), kind.options
    if options.threads:
        torch.set_num_threads(options.threads)
    with run_in(work, out, console, resume=resume, force=force):
        start = prepare_head(name, data, work, kind, console)
        k = kind.num_draft_tokens
        during = _held_out(start, options.held_out_rows, k)
        judge = _judge(during, console) if during else None
        state = train(start.head, start.target, start.rows, work, options, console, judge, kind.loss)
        last = _held_out(start, FINAL_ROWS, k)
        kind.finish(start.head, lambda count: _held_out(start, options.held_out_rows, count))
        report = measure(start, last, k)
        record = build_record(
            command=command,
            target={"name": start.served.name, "number_format": number_format(start.served)},
            config=start.head.config,
            options=asdict(options),
            rows=start.rows,
            coverage=start.coverage,
            state=state,
            report=report,
            parameters=sum(parameter.numel() for parameter in start.head.parameters()),
            device=device_name(start.target.output_rows.device),
        )
        save(out, start, record)
        has_picture = draw_curves(work, out)
        write_card(out, record, report, PICTURE if has_picture else None)
        for line in report.lines() + ([] if has_picture else [REMEDY]):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _judge(held_out: HeldOut, console: Console) -> Callable[[HeadModule], float]:
    """What a run is judged by on its way, told as it is found."""

    def evaluate(head: HeadModule) -> float:
        found = held_out.score(head)
        console.print(
            f"mean acceptance length {found.mean_acceptance_length:.3f} ({shown(found.per_position)}), "
            f"overlap {shown(found.overlap)}",
            highlight=False,
        )
        return found.score

    return evaluate


def prepare_head(name: str, data: Path, work: Path, kind: HeadKind[Any], console: Console) -> Start:
    """Load the target, read the data, and set the head's first weights.

    Raises:
        ConfigError: the target has no tokenizer, or its states in training are not those in drafting.
    """
    options = kind.options
    where = training_device(options.device)
    reuse_memory()
    served = load_model(name, device=where)
    tokenizer = tokenizer_of(name)
    rows = read_rows(data, served, tokenizer, work / "packed", options.window, console)
    config = kind.config(name, served, rows.window)
    counts = token_counts(rows)
    vocabulary = draft_vocabulary(counts, config.draft_vocab_size, served.eos_token_ids)
    target = Target.of(served, frozen_model(name, where), config.layers, vocabulary)
    first = rows.batch(0, _FIRST_ROWS, options.seed)
    document = first.tokens[0][first.documents[0] == 0]
    apart = check_states(target.states, served, document.tolist())
    console.print(
        "states in training and in drafting differ by "
        + ", ".join(f"{value:.1%} (layer {layer})" for layer, value in zip(target.states.layers, apart, strict=True)),
        highlight=False,
    )
    head = kind.module(config)
    kind.set_first_weights(head, target.states.of(document, [len(document)])[1:, -1], target.output_rows)
    coverage = float(counts[vocabulary].sum() / counts.sum())
    return Start(served, target, rows, head.to(where), vocabulary, coverage, kind)


def _held_out(start: Start, count: int, num_draft_tokens: int) -> HeldOut:
    """So many held-out rows, for drafts of K tokens."""
    return HeldOut(start.target, start.rows.held_out(), count, start.vocabulary, num_draft_tokens, start.kind.guess)


def measure(start: Start, held_out: HeldOut, num_draft_tokens: int) -> HeadReport:
    """Score and costs of a head."""
    head = start.head
    stored = StoredHead(head.config, weights(head), _d2t(start))
    first = start.rows.batch(0, 1, 0)
    prompt = first.tokens[0][first.documents[0] == 0].tolist()
    costs = head_costs(start.served, start.kind.drafter(stored), prompt, num_draft_tokens)
    return HeadReport.of(held_out.score(head), costs)


def save(out: Path, start: Start, record: dict[str, Any]) -> None:
    """Write the head's folder."""
    head = start.head
    save_head(
        out,
        head.config,
        weights(head),
        _d2t(start),
        record,
        fingerprint=target_fingerprint(start.served),
        number_format=number_format(start.served),
    )


def weights(head: HeadModule) -> dict[str, Tensor]:
    """Its tensors by name."""
    return {name: parameter.detach().cpu() for name, parameter in head.named_parameters()}


def _d2t(start: Start) -> Tensor | None:
    config = start.head.config
    return offsets(start.vocabulary) if config.draft_vocab_size < config.vocab_size else None


PICTURE = "curves.png"
REMEDY = "no picture of the curves: Matplotlib is not installed (pip install 'forerun[curves]')"
_SMOOTHED = 32
"""Steps over which the loss is averaged."""


def read_curves(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Loss and score by step; what a resumed run did again counts once."""
    losses: dict[int, float] = {}
    scores: dict[int, float] = {}
    for line in (folder / METRICS).read_text().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # cut short by a kill
            continue
        (scores if "score" in entry else losses)[entry["step"]] = entry.get("score", entry.get("loss"))
    return losses, scores


def draw_curves(run: Path, out: Path) -> bool:
    """Draw what a run has written into its folder, as PICTURE in `out`. False without Matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    losses, scores = read_curves(run)
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = sorted(losses)
    smoothed = []
    for place in range(len(steps)):
        near = [losses[step] for step in steps[max(0, place - _SMOOTHED + 1) : place + 1]]
        smoothed.append(sum(near) / len(near))
    axes.plot(steps, smoothed, color="tab:blue", label="loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color="tab:blue")
    if scores:
        right = axes.twinx()
        right.plot(sorted(scores), [scores[step] for step in sorted(scores)], "o-", color="tab:orange")
        right.set_ylabel("mean acceptance length", color="tab:orange")
    figure.savefig(out / PICTURE, dpi=110)
    return True


CONTEXT = 256
"""Tokens of the prompt, at most."""
TOKENS = 24
"""Of each generation that is timed."""


@torch.no_grad()
def head_costs(served: LanguageModel, head: Drafter, prompt: Sequence[int], num_draft_tokens: int) -> StepCosts:
    """Seconds of the engine's steps with a head as the drafter, by the tokens of its drafts.

    Args:
        head: not yet bound to the target.
        prompt: text that the head was made for; its first CONTEXT tokens, and half of the target's context, are read.
    """
    head.bind(Binding(served, None, 0))
    most = min(CONTEXT, served.context_length // 2)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return step_costs(served, None, lambda: head, num_draft_tokens, prompt[:most], params)
