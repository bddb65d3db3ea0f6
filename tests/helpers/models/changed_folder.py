"""A model's folder with other settings in its configuration."""

from __future__ import annotations

import json
from pathlib import Path


def changed(folder: Path, out: Path, **settings: object) -> Path:
    """Write the folder `out`, with the files of `folder` but for these settings of its config.json, and return it."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).symlink_to(path)
    (out / "config.json").unlink()
    said = json.loads((folder / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**said, **settings}))
    return out
