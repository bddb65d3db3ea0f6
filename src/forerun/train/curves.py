"""A picture of a run: its loss and its evaluations by step."""

from __future__ import annotations

import json
from pathlib import Path

from forerun.train.loop import METRICS

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
