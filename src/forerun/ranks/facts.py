"""What the ranks of a group must have in common, compared before they compute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from forerun.errors import RankError
from forerun.ranks.peers import Peers
from forerun.ranks.process_state import Process

_ROOM = 8192
"""Bytes for the facts of one rank."""

Facts = Mapping[str, str]


def compare(peers: Peers, facts: Facts) -> None:
    """Tell the others what this rank is, and learn what they are.

    Raises:
        RankError: one of them differs from the leader; says in what.
    """
    own = Process.here()
    text = json.dumps({"host": own.host, "pid": own.pid, "facts": dict(facts)}).encode()
    data = torch.zeros(_ROOM, dtype=torch.uint8)
    data[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    every = [json.loads(bytes(part.numpy()).rstrip(b"\0")) for part in peers.exchange(data)]
    peers.processes = [Process(each["host"], each["pid"]) for each in every]
    difference = first_difference([each["facts"] for each in every])
    if difference is not None:
        rank, sentence = difference
        raise RankError(f"{sentence} Ranks that differ do not compute the same bits: make them alike.", rank)


def first_difference(every: Sequence[Facts]) -> tuple[int, str] | None:
    """The first rank that differs from rank 0, and in what; None where all are alike. every: facts by rank."""
    leader = every[0]
    for rank, facts in enumerate(every[1:], 1):
        for name in [*leader, *(name for name in facts if name not in leader)]:
            ours, theirs = leader.get(name), facts.get(name)
            if ours != theirs:
                return rank, f"Rank {rank} has {name} {theirs}, but rank 0 has {ours}."
    return None
