"""A rank that another process has started: python -m forerun.models.sharded.rank FOLDER RANK."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from forerun.errors import RankError
from forerun.files.json_file import read_json
from forerun.models.sharded.loading import end_rank, follow, plan_of
from forerun.ranks.joining import join_by_file
from forerun.ranks.peers import Peers
from forerun.ranks.spawned import OPTIONS, STORE
from forerun.ranks.watch import end_with_pipe


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
        follow(plan_of(options["name"], options["dtype"], options["quantize"]), peers)
    except Exception as error:
        end_rank(rank, peers, error)


if __name__ == "__main__":
    main()
