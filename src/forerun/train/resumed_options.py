"""The check that a resumed run has the options of the run it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError
from forerun.files.json_file import Fields
from forerun.files.write import write_json

FILE_NAME = "options.json"


def pin(folder: Path, options: dict[str, Any]) -> None:
    """Write `options` into `folder`, or compare them with those a former run wrote there.

    Raises:
        ConfigError: the file is damaged, or some differ: what is in the folder would not fit what is added to it.
    """
    path = folder / FILE_NAME
    plain = json.loads(json.dumps(options))
    if not path.exists():
        write_json(path, plain, error=ConfigError)
        return
    former = Fields.read(path, ConfigError, remedy="Give another --work, or --force to begin anew.").values
    changed = sorted(key for key in {*plain, *former} if plain.get(key) != former.get(key))
    if changed:
        described = ", ".join(f"{key} was {str(former.get(key))[:80]} and is {plain.get(key)}" for key in changed)
        raise ConfigError(f"{folder} belongs to another run: {described}. Give the same options, or another --work.")
