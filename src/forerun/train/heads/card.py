"""The card beside a trained head."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.drafters.base import TRAINING_RECORD
from forerun.drafters.models.heads.config import HeadConfig
from forerun.errors import ConfigError
from forerun.speculation.predictor import CostsByK
from forerun.train.card import CARD, NOT_JUDGED, chance_line, stage_record, versions
from forerun.train.checkpoint import METRICS, LoopState
from forerun.train.data.packed import PackedShard
from forerun.train.heads.evaluate import HeadScore, cell_text
from forerun.utils.files import write_bytes, write_json

PICTURE = "curves.png"
REMEDY = "no picture of the curves: Matplotlib is not installed (pip install 'forerun[curves]')"
_SMOOTHED = 32
"""Steps over which the loss is averaged."""


@dataclass(frozen=True, slots=True)
class HeadReport:
    """A head measured with its target.

    Attributes:
        speedups: over plain decoding, predicted from the costs of steps on this machine, by K.
    """

    score: HeadScore
    costs: CostsByK
    speedups: dict[int, float]

    @classmethod
    def of(cls, score: HeadScore, costs: CostsByK) -> HeadReport:
        """Predict the speed-ups for every K up to the one that was scored; none where nothing was."""
        most = score.num_draft_tokens if score.is_judged else 0
        lengths = {k: score.length_of_chains(k) for k in range(1, most + 1)}
        return cls(score, costs, {k: costs.speedup(length, k) for k, length in lengths.items()})

    def record(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        score = self.score
        is_greedy = self.score.reached[0] > 0
        return {
            "num_draft_tokens": score.num_draft_tokens,
            "mean_acceptance_length": round(score.mean_acceptance_length, 4) if is_greedy else None,
            "per_position": [round(value, 4) for value in score.per_position] if is_greedy else None,
            "by_context": {str(start): round(value, 4) for start, value in score.lengths_by_context.items()},
            "overlap_at_temperature_1": [round(value, 4) for value in score.overlap] if score.starts else None,
            "per_position_at_temperature_1": [round(value, 4) for value in score.drawn_per_position] or None,
            "mean_acceptance_length_at_temperature_1": round(score.expected_length, 4) if score.starts else None,
            "most_frequent_token": round(score.constant, 4),
            "documents": score.documents,
            "greedy_documents": score.greedy_documents,
            "plain_step_ms": round(1000 * self.costs.plain, 3),
            "target_step_ms": [round(1000 * value, 3) for value in self.costs.target],
            "head_step_ms": [round(1000 * value, 3) for value in self.costs.draft],
            "engine_step_ms": [round(1000 * value, 3) for value in self.costs.rest],
            "predicted_speedup": {str(k): round(value, 3) for k, value in self.speedups.items()},
        }

    def lines(self) -> list[str]:
        """Return the report as lines of Markdown."""
        score = self.score
        k = self.score.num_draft_tokens
        if not score.is_judged:
            return [f"- Evaluation: {NOT_JUDGED}"]
        by_context = ", ".join(f"{value:.2f} from {start}" for start, value in score.lengths_by_context.items())
        speedups = ", ".join(f"{value:.2f} at K={k}" for k, value in self.speedups.items())
        answers = f"{score.greedy_documents} of {score.documents} held-out answers"
        costs = self.costs
        parts = f"target {_ms(costs.target[k])}, head {_ms(costs.draft[k])}, engine {_ms(costs.rest[k])}"
        steps = f"plain step {_ms(costs.plain)}; with K={k}: {parts}"
        length = f"mean acceptance length {score.mean_acceptance_length:.3f}"
        length += f"; acceptance by position: {cell_text(score.per_position)}"
        chance = f"- {chance_line('head', score.first, score.constant)}"
        return [
            f"- Greedy chains of {k} on {answers}: {length if score.reached[0] else 'nothing to judge by'}",
            f"- By tokens of context: {by_context or 'no greedy answers'}",
            f"- Overlap at temperature 1 by position: {cell_text(score.overlap)}; length {score.expected_length:.3f}",
            f"- Predicted speed-up over plain decoding here: {speedups} ({steps})",
            *([chance] if score.is_chance else []),
        ]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def head_record(
    *,
    command: str,
    target: dict[str, Any],
    config: HeadConfig,
    options: dict[str, Any],
    rows: PackedShard,
    coverage: float,
    state: LoopState,
    report: HeadReport,
    parameters: int,
    device: str,
) -> dict[str, Any]:
    """Collect the content of the card, as JSON values."""
    return {
        "kind": f"{config.kind} head",
        "command": command,
        "target": target,
        "parameters": parameters,
        "head": asdict(config),
        "data": {
            "documents": rows.num_documents,
            "tokens": rows.num_tokens,
            "wanted": rows.num_wanted,
            "made_from": dict(rows.made_from),
            "vocabulary_coverage": round(coverage, 4),
        },
        "training": {**stage_record(state), "scores": [[step, round(score, 4)] for step, score in state.scores]},
        "held_out": report.record(),
        "options": options,
        "device": device,
        "versions": versions(),
    }


def write_head_card(folder: Path, record: dict[str, Any], report: HeadReport, picture: str | None) -> None:
    """Write `README.md` and `training.json` into a head's folder."""
    write_json(folder / TRAINING_RECORD, record, error=ConfigError)
    data = record["data"]
    training = record["training"]
    head = record["head"]
    tokens = f"{head['draft_vocab_size']:,} of {head['vocab_size']:,} tokens"
    coverage = f"{data['vocabulary_coverage']:.1%} of those that it learnt to predict"
    trained = f"{training['steps']:,} steps, {training['tokens']:,} tokens, {training['seconds']:,} s"
    lines = [
        f"# {record['kind']} for {record['target']['name']}",
        "",
        f"{record['parameters'] / 1e6:.2f} M parameters. It proposes {tokens} ({coverage}).",
        "",
        f"- Command: `{record['command']}`",
        f"- Data: {data['documents']:,} documents, {data['tokens']:,} tokens, {data['wanted']:,} of them to predict.",
        f"- Training: {trained}, {training['tokens_per_second']:,} tokens/s, final loss {training['final_loss']}.",
        *report.lines(),
        f"- Device: {record['device']}",
        "- Versions: " + ", ".join(f"{name} {number}" for name, number in record["versions"].items()),
    ]
    if picture:
        lines += ["", f"![loss and acceptance length]({picture})"]
    lines += ["", "`training.json` says the same for programs, with every option.", ""]
    write_bytes(folder / CARD, "\n".join(lines).encode(), error=ConfigError)


def read_curves(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Read loss and score by step; steps that a resumed run repeated count once."""
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
    """Draw loss and score of the run in a folder as PICTURE in `out`. Returns False without Matplotlib."""
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
    for index in range(len(steps)):
        near = [losses[step] for step in steps[max(0, index - _SMOOTHED + 1) : index + 1]]
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
