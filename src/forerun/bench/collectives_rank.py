"""A rank that gathers are timed with: python -m forerun.bench.collectives_rank FOLDER RANK."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import torch

from forerun.errors import RankError
from forerun.files.json_file import read_json
from forerun.ranks.joining import join_by_file
from forerun.ranks.spawned import OPTIONS, STORE
from forerun.ranks.watch import end_with_pipe, leave


def main() -> None:
    """Take part in the gathers that rank 0 times."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_pipe()
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    options = read_json(folder / OPTIONS, RankError)
    try:
        peers = join_by_file(folder / STORE, rank, options["count"])
        for rows in options["rows"]:
            part = torch.randn(rows, options["width"])
            for _ in range(options["rounds"]):
                peers.exchange(part)
    except RankError as error:
        leave(f"rank {rank}: {error}")


if __name__ == "__main__":
    main()
