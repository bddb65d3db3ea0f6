"""The target's states on disk, so that a later epoch need not compute them: a file for each packed row, up to a bound.

Rows are computed one by one, so that their bits do not depend on which of them are there already: a resumed run ends
with the weights of one that was never stopped.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from forerun.errors import ConfigError
from forerun.files.write import digest, remove, write_bytes
from forerun.train.data.packed import NO_DOCUMENT
from forerun.train.heads.target_states import TargetStates

_NAME = "states"


class StateCache:
    """A folder of states of one run, whose target and layers do not change.

    Args:
        bound: bytes of the files together, at most.
    """

    def __init__(self, folder: Path, bound: int) -> None:
        self._folder, self._bound, self._lock = folder, bound, threading.Lock()
        for path in folder.glob(".row-*.tmp"):  # of a process that was killed
            remove(path)
        self._nbytes = sum(path.stat().st_size for path in folder.glob("row-*.safetensors"))

    def of(self, states: TargetStates, tokens: Tensor, documents: Tensor) -> Tensor:
        """[N, layers, H] of the documents of packed rows, one after another. tokens, documents: [rows, window + 1].

        Raises:
            ConfigError: the disk is full.
        """
        return torch.cat([self._row(states, *row) for row in zip(tokens, documents, strict=True)])

    def _row(self, states: TargetStates, tokens: Tensor, documents: Tensor) -> Tensor:
        path = self._folder / f"row-{digest(tokens.numpy(), documents.numpy())}.safetensors"
        try:
            return load(path.read_bytes())[_NAME]
        except (OSError, SafetensorError, KeyError):
            pass
        used = documents != NO_DOCUMENT
        lengths = torch.unique_consecutive(documents[used], return_counts=True)[1].tolist()
        found = states.of(tokens[used], lengths)
        content = save({_NAME: found.cpu()})
        with self._lock:
            is_room = self._nbytes + len(content) <= self._bound
            self._nbytes += len(content) if is_room else 0
        if is_room:
            write_bytes(path, content, error=ConfigError)
        return found
