"""What a reader is told of each file beside its figures: what was measured, with what, where and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from forerun.results import Results

TITLES: Mapping[str, str] = {
    "generate": "Whole generations",
    "acceptance": "Acceptance",
    "forward": "One forward",
    "load": "Many requests at once",
    "serve": "Servers under load",
    "quality": "What the weights' format costs",
    "overhead": "Drafting without a model",
    "engine": "The engine's own time",
    "replay": "The automatic K by measured costs",
    "peers": "Beside other engines",
    "tune": "Tuning",
    "audit": "Audit of losslessness",
    "plan": "Plan",
    "journal": "Traffic of a server",
    "study": "Study",
}


def title(results: Results) -> str:
    """Of a file's section."""
    target = results.target
    about = ", ".join(filter(None, (target.name, target.number_format))) if target is not None else ""
    if results.kind == "journal":  # several are told apart by it
        about += f", drafter {', '.join(each.name for each in results.drafters) or 'none'}"
    return f"{TITLES[results.kind]}{': ' * bool(about)}{about}"


def file_name(results: Results) -> str:
    """Without its folders."""
    return results.source.replace("\\", "/").rpartition("/")[2]


def environment_rows(results: Results) -> list[tuple[str, str]]:
    """What made the figures, name by name."""
    at = results.environment
    commit = f", commit {at.commit}{' with changes' * at.dirty}" if at.commit else ""
    rows = [
        ("command", results.command),
        ("date", f"{at.date}, for {duration(at.seconds)}"),
        ("forerun", f"{at.forerun}{commit}"),
        ("software", f"Python {at.python}, torch {at.torch}, transformers {at.transformers}"),
        ("processor", f"{at.processor} ({at.instructions}), {at.system}"),
        ("kernels", at.kernels or "not asked for"),
        ("threads", f"{at.threads} of {at.cores} cores"),
        ("load average", f"{_load(at.load_before)} before, {_load(at.load_after)} after (1, 5, 15 minutes)"),
        ("taken away", _taken(results)),
        ("drafters", _drafters(results)),
        ("settings", ", ".join(f"{name} {_setting(value)}" for name, value in results.settings.items())),
        ("prompts", _prompts(results)),
    ]
    rows += [("accelerator", at.accelerator)] if at.accelerator else []
    return [(name, text) for name, text in rows if text]


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _load(averages: Sequence[float]) -> str:
    return " ".join(f"{each:.2f}" for each in averages) or "not told"


def _taken(results: Results) -> str:
    at = results.environment
    parts = [] if at.stolen is None else [f"{100 * at.stolen:.1f} % of the processors' time by the host"]
    parts += [] if at.others is None else [f"{at.others:.2f} processors by other processes"]
    return ", ".join(parts)


def _drafters(results: Results) -> str:
    return "; ".join(
        f"{each.text} (K {', '.join(map(str, each.num_draft_tokens))})" if each.num_draft_tokens else each.text
        for each in results.drafters
    )


def _prompts(results: Results) -> str:
    if not results.prompts:
        return ""
    lengths = sorted(prompt.num_tokens for prompt in results.prompts)
    names = ", ".join(dict.fromkeys(prompt.workload for prompt in results.prompts))
    return f"{len(lengths)} of {names}, {lengths[0]} to {lengths[-1]} tokens"


def _setting(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
