"""Ranks that this process starts, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.errors import RankError
from forerun.files.write import write_json

OPTIONS, STORE = "options.json", "store"
"""In the folder that the ranks share, which nobody else can read."""
PATIENCE = 3.0
"""Seconds that a rank gets to end by itself."""


class Spawned:
    """Processes of ranks 1, 2, ... on this machine.

    Each reads options.json of their folder, and ends when this process does: its standard input is a pipe from here.

    Args:
        module: what they run: python -m MODULE FOLDER RANK.
        count: of all ranks, this process included.
        options: plain values for them.
    """

    def __init__(self, module: str, count: int, options: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forerun-ranks-")
        folder = Path(self._folder.name)
        write_json(folder / OPTIONS, dict(options), error=RankError)
        self.store = folder / STORE
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self.children = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(folder), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
            for rank in range(1, count)
        ]

    def check(self) -> None:
        """Raise RankError where one has ended."""
        for rank, child in enumerate(self.children, 1):
            code = child.poll()
            if code is not None:
                raise RankError(
                    f"Rank {rank} (process {child.pid}) has ended {_ending(code)} before it had started. What it "
                    "printed above says why.",
                    rank,
                )

    def end(self, patience: float = PATIENCE) -> None:
        """Let them end, and kill those that do not."""
        end = time.monotonic() + patience
        for child in self.children:
            try:
                child.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()  # also one that is stopped
                child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self._folder.cleanup()


def _ending(code: int) -> str:
    return f"by signal {-code}" if code < 0 else f"with code {code}"
