"""Which trials of the self-test native kernels have passed, kept for the next load of a model of the same shapes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from forerun import __version__
from forerun.models.llama.native import NativeLlamaDecoder
from forerun.utils import machine
from forerun.utils.entry_file import EntryFile, key_here
from forerun.utils.files import file_digest
from forerun.utils.home import SELF_TESTS_STEM


@dataclass(frozen=True, slots=True)
class Passed:
    """What has passed on this machine.

    Attributes:
        trials: their names.
        rows: that they computed.
        seconds: that they took.
    """

    trials: tuple[str, ...] = ()
    rows: int = 0
    seconds: float = 0.0

    @classmethod
    def restored(cls, state: Any) -> Passed:
        """Return an entry of its JSON value. Raises ValueError, TypeError or KeyError for one that is damaged."""
        trials, rows, seconds = state["trials"], state["rows"], state["seconds"]
        if not (isinstance(trials, list) and isinstance(rows, int) and isinstance(seconds, float)):
            raise TypeError
        return cls(tuple(map(str, trials)), rows, seconds)


FILE = EntryFile(SELF_TESTS_STEM, 1, "passed self-tests", Passed.restored, asdict)


def self_test_key(decoder: NativeLlamaDecoder, context_length: int) -> str:
    """Return the key of all that decides whether the trials pass: the library, processor, instructions, threads, and
    the shapes and formats of the layers that are tried."""
    library = decoder.library
    with library.path.open("rb") as file:
        build = file_digest(file)
    parts = (build, library.instructions, library.shares_openmp, torch.get_num_threads(), context_length)
    versions = (__version__, torch.__version__, machine.model(), *machine.features())
    return key_here((*versions, *map(str, parts), str(decoder.shapes)))
