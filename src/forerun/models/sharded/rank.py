"""A rank that another process has started: python -m forerun.models.sharded.rank FOLDER RANK."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from forerun.errors import ForerunError, RankError
from forerun.files.json_file import read_json
from forerun.models.sharded.loading import _plan, follow
from forerun.ranks.joining import join_by_file, say_why
from forerun.ranks.peers import Peers
from forerun.ranks.spawned import OPTIONS, STORE
from forerun.ranks.watch import end_with_pipe, leave


def main() -> None:
    """Compute what rank 0 asks for, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interrupt means
    end_with_pipe()
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    options = read_json(folder / OPTIONS, RankError)
    torch.set_num_threads(options["threads"])
    peers: Peers | None = None
    try:
        peers = join_by_file(folder / STORE, rank, options["count"])
        follow(_plan(options["name"], options["dtype"], options["quantize"]), peers)
    except Exception as error:
        reason = str(error) if isinstance(error, ForerunError) else f"{type(error).__name__}: {error}"
        joined = peers
        leave(f"rank {rank}: {reason}", last=lambda: _say(joined, error, reason))


def _say(peers: Peers | None, error: Exception, reason: str) -> None:
    """What others have lost this rank by; not what this one has lost others by."""
    if peers is not None and error is not peers.lost:
        say_why(peers, reason)


if __name__ == "__main__":
    main()
