"""forerun.toml as tuning writes it: a table for each command that answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.config import AUTO
from forerun.drafters.third_party import named_module
from forerun.errors import ConfigError
from forerun.lab.tune.arms import TuningArm
from forerun.utils.files import write_bytes

MARK = "# Written by forerun tune"
"""How such a file begins: no other is replaced."""


def check_config_path(path: Path) -> None:
    """Raise ConfigError where something lies at the path that is not tuning's own."""
    try:
        with path.open(encoding="utf-8") as file:
            own = file.readline().startswith(MARK)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(f"The folder {path.parent} does not exist. Make it, or give another --out.") from None
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give another --out.") from None
    if not own:
        raise ConfigError(f"{path} exists, and was not written by forerun tune. Give another --out, or move it.")


def write_config(
    path: Path,
    model: str,
    arm: TuningArm,
    settings: Mapping[str, Any],
    *,
    chat: bool,
    notes: Sequence[str],
) -> None:
    """Write the configuration.

    Args:
        model: the target's name.
        arm: what to run.
        settings: further keys of all tables, such as dtype and quantize.
        chat: whether the target has a chat template.
        notes: lines of comment, the reason first.

    Raises:
        ConfigError: it cannot be written.
    """
    module = named_module(arm.drafter)
    keys: dict[str, Any] = {"model": model}
    lines = [f"{MARK}.", *(f"# {' '.join(note.split())}" for note in notes)]
    if module is None:
        keys["drafter"] = arm.drafter
        if arm.num_draft_tokens not in (AUTO, 0):
            keys["num_draft_tokens"] = arm.num_draft_tokens
    else:  # a file may not name code to run
        lines.append(f"# The drafter is given on the command line, since it is code: --drafter {arm.drafter}")
    keys |= {name: value for name, value in settings.items() if value is not None}
    for command in ("generate", "chat", "serve") if chat else ("generate", "serve"):
        lines += ["", f"[{command}]", *(f"{name} = {_written(value)}" for name, value in keys.items())]
    write_bytes(path, ("\n".join(lines) + "\n").encode(), error=ConfigError)


def _written(value: object) -> str:
    """Format a value as TOML, whose strings are JSON's but for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
