"""Pictures of results by Matplotlib, as PNG files: one for each figure and what it was measured on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.lab.bench.report.markdown import title
from forerun.lab.results.schema import FIGURES, Figure, Results

INSTALL = "pip install 'forerun[report]'"
METHOD_LABELS = ("method", "drafter", "num_draft_tokens")
"""Labels that distinguish methods; all other labels distinguish pictures."""


@dataclass(frozen=True, slots=True)
class PictureKind:
    """What a picture shows.

    Attributes:
        figures: names of its figures; the first is its title.
        at: the label whose numbers stand on the horizontal axis; "": a row for each method.
        scale, unit: values are shown times `scale`, in that unit; "": in that of the figure.
        part: of figures of several parts, the one that is drawn.
    """

    figures: Sequence[str]
    at: str = ""
    scale: float = 1.0
    unit: str = ""
    part: str | None = None


_SPEED = PictureKind(["over_plain"])
_FIRST = PictureKind(["first_token"], scale=1e3, unit="ms")
_POSITIONS = PictureKind(["position_acceptance"], "position")
KINDS: Mapping[str, Sequence[PictureKind]] = {
    "generate": (_SPEED, _POSITIONS, _FIRST),
    "acceptance": (PictureKind(["acceptance_length"]), _POSITIONS),
    "forward": tuple(PictureKind(["forward", "roofline"], each, 1e3, "ms") for each in ("rows", "sequences")),
    "serve": (
        PictureKind(["tokens_per_second"], "outstanding"),
        PictureKind(["over_plain"], "outstanding"),
        PictureKind(["first_token"], "outstanding", 1e3, "ms"),
        PictureKind(["per_token"], "outstanding", 1e3, "ms"),
    ),
    "quality": (PictureKind(["perplexity_lost"]),),
    "tune": (PictureKind(["over_plain"], part="report"), PictureKind(["over_plain"], part="choosing")),
}
"""By the kind of results."""


def check_installed() -> None:
    """Raise ConfigError where Matplotlib is not."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"Matplotlib, which draws pictures, is not installed. Install it: {INSTALL}; or leave --pictures out."
        ) from None


def draw(every: Sequence[Results], folder: Path) -> list[Path]:
    """Draw all that can be drawn into a folder, which is created; return the files, in the order of the results.

    Raises:
        ConfigError: the folder or a file cannot be written.
    """
    made = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for results in every:
            for name, kind, about, figures in _pictures(results):
                made.append(folder / f"{name}.png")
                _drawn(kind, figures, "\n".join(filter(None, (title(results), about)))).savefig(made[-1], dpi=150)
    except OSError as error:
        raise ConfigError(f"--pictures is {folder}, which cannot be written: {error.strerror}.") from None
    return made


def _pictures(results: Results) -> Iterator[tuple[str, PictureKind, str, list[Figure]]]:
    """Yield name, kind, what it was measured on, and figures of each picture. Figures of single categories are not
    drawn."""
    for kind in KINDS.get(results.kind, ()):
        found: defaultdict[tuple[str, ...], list[Figure]] = defaultdict(list)
        for each in results.figures:
            labels = each.labels
            is_of = each.name in kind.figures and each.value is not None and not labels.get("category")
            if is_of and kind.part in (None, labels.get("part")) and (not kind.at or kind.at in labels):
                apart = [name for name in labels if name not in (*METHOD_LABELS, kind.at)]
                found[tuple(f"{name} {labels[name]}" for name in apart if labels[name] != "")].append(each)
        for about, figures in found.items():
            words = [results.file_name.removesuffix(".json"), kind.figures[0], *([f"by {kind.at}"] if kind.at else [])]
            yield re.sub(r"[^\w.]+", "-", " ".join([*words, *about])), kind, ", ".join(about), figures


def _drawn(kind: PictureKind, figures: Sequence[Figure], about: str) -> Any:
    """Draw values with their 95 % intervals, as a line or as a row for each method."""
    from matplotlib.figure import Figure as Canvas

    methods = list(dict.fromkeys(str(each.labels.get("method", "")) for each in figures))
    canvas = Canvas(figsize=(6.4, 3.8 if kind.at else 1.6 + 0.3 * len(methods)), layout="constrained")
    axes = canvas.add_subplot()
    axes.set_title(about, fontsize="medium")
    unit, value_title = FIGURES[kind.figures[0]]
    value_title = f"{value_title}, {kind.unit or unit}".rstrip(", ")
    for row, method in enumerate(methods):
        mine = [each for each in figures if str(each.labels.get("method", "")) == method]
        values = [kind.scale * (each.value or 0.0) for each in mine]
        errors = [[kind.scale * abs(each.value - bound) if each.value is not None and bound is not None else 0.0
                   for each, bound in zip(mine, side, strict=True)]
                  for side in ([each.low for each in mine], [each.high for each in mine])]  # fmt: skip
        if kind.at:
            axes.errorbar([float(each.labels[kind.at]) for each in mine], values, errors, marker="o", label=method)
        else:
            axes.errorbar(values, [row] * len(mine), xerr=errors, fmt="o")
    if kind.at:
        axes.set(xlabel=kind.at.replace("_", " "), ylabel=value_title, ylim=(0, None))
        canvas.legend(loc="outside lower center", ncols=2, fontsize="small")
    else:
        axes.set_yticks(range(len(methods)), methods)
        axes.set(xlabel=value_title, ylim=(len(methods) - 0.5, -0.5))
    if unit == "times":
        (axes.axhline if kind.at else axes.axvline)(1, color="grey", linestyle="--")
    axes.grid(alpha=0.3)
    return canvas
