"""A trained head at 8 bits, in forerun's form: a quarter of its float32 bytes, as heads are shipped."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forerun.errors import ConfigError
from forerun.export.files import Exported, check_place, check_room
from forerun.files.write import refuse_to_overwrite, whole_folder, write_bytes
from forerun.heads import load_head, save_head
from forerun.heads.folder import CONFIG, head_settings
from forerun.heads.public_forms import WEIGHTS

CARD = "README.md"
_INT8: Literal["int8"] = "int8"


def export_head(head: Path, out: Path) -> Exported:
    """Write a head with its matrices at 8 bits and a scale a row, and what lies beside it: card, record, picture.

    The folder is new.

    Args:
        head: folder of a head that forerun trained.

    Raises:
        ConfigError: `out` is there, cannot be written, or has too little room; the head is of a public form, or at 8
            bits already.
        ModelLoadError: the head cannot be read.
    """
    refuse_to_overwrite(out, ConfigError)
    check_place(out)
    if "format" not in head_settings(head).values:
        raise ConfigError(f"{head} is a head of a public form, which has no 8 bits. Give one that forerun trained.")
    stored = load_head(head)
    if stored.codes:
        raise ConfigError(f"{head} is at 8 bits already. Copy the folder, or give the head that it was made of.")
    check_room(out, stored.nbytes)
    beside = [path for path in sorted(head.iterdir()) if path.name not in (CONFIG, WEIGHTS) and path.is_file()]
    with whole_folder(out, ConfigError) as fresh:
        save_head(
            fresh,
            stored.config,
            stored.tensors,
            stored.d2t,
            stored.record,
            fingerprint=stored.fingerprint,
            number_format=stored.number_format,
            quantize=_INT8,
        )
        for path in beside:
            note = _NOTE if path.name == CARD else ""
            write_bytes(fresh / path.name, path.read_bytes() + note.encode(), error=ConfigError)
        written = {path.name: path.stat().st_size for path in fresh.iterdir()}
    count = sum(tensor.numel() for tensor in stored.tensors.values())
    return Exported(count, _INT8, sum(written.values()), tuple(sorted(written)))


_NOTE = """
The matrices in this folder are kept at 8 bits, with a scale a row; the figures above are of the weights before that.
"""
