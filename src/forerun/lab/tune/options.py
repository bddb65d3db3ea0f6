"""The options of `forerun tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.utils.fields import Checked, option

LEAST_PROMPTS = 4
"""Two to choose by and two to measure on: with fewer there is no interval."""


@dataclass(frozen=True, slots=True)
class TuneOptions(Checked):
    """How long to tune, on which prompts, and where the answer is written."""

    minutes: float = option(
        3.0, "Time to spend, loading the target apart. Tuning ends earlier if it can.", low=0, above=True
    )
    max_tokens: int = option(128, "Tokens of each answer.", low=2)
    temperature: float = option(0.0, "At which prompts are answered that ask for none.", low=0, high=100)
    num_prompts: int | None = option(
        None,
        "Prompts that are used, categories in turn.",
        low=LEAST_PROMPTS,
        default_text="24 of a bundled workload, all of a file",
    )
    load: str = option("1", "Requests at once, with commas between several levels.", metavar="N,...")
    drafters: str | None = option(
        None,
        "Drafters to try, with commas between them; with semicolons where their options hold commas.",
        metavar="DRAFTER,...",
        default_text="all that fit the target",
    )
    out: Path = option(Path("forerun.toml"), "Where the configuration is written; --config reads it.", metavar="FILE")
    results: Path | None = option(
        None, "Write all trials and figures into this JSON file, for `forerun bench report`.", metavar="FILE"
    )
