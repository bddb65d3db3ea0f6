"""How the ranks of a group find each other: through a file that spawned ranks share, or through torchrun's store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, RankError
from forerun.ranks.peers import Peers, rank_timeout

ARRIVAL_TIMEOUT = 120.0
"""Seconds in which all ranks must have started."""
_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> tuple[int, int] | None:
    """Rank and number of ranks where torchrun, or another launcher that speaks its language, has started this process;
    None elsewhere.

    Raises:
        ConfigError: the launcher's variables are no numbers.
    """
    if not all(os.environ.get(name) for name in _LAUNCHED):
        return None
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise ConfigError(f"RANK and WORLD_SIZE must be numbers: {error}. Unset them, or start by torchrun.") from None
    return rank, count


def join_by_file(path: Path, rank: int, count: int, check: Callable[[], None] = lambda: None) -> Peers:
    """The group of ranks that share a file, on one machine.

    Args:
        check: is called while others are waited for; it raises where waiting is in vain.

    Raises:
        RankError: a rank has not come in time.
    """
    distributed = _distributed()
    store = distributed.FileStore(str(path), count)
    return _joined(distributed, store, rank, count, "127.0.0.1", check)


def join_by_launcher(rank: int, count: int) -> Peers:
    """The group of ranks that torchrun has started, wherever they are.

    Raises:
        RankError: its store cannot be reached, or a rank has not come in time.
    """
    distributed = _distributed()
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = distributed.TCPStore(
            host, int(port), count, rank == 0 and not hosted, timedelta(seconds=ARRIVAL_TIMEOUT), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"The ranks' store at {host}:{port} cannot be reached or opened: {str(error).splitlines()[0]} "
            "Another program may use the port; give torchrun another one (--master-port)."
        ) from None
    store = distributed.PrefixStore(f"forerun{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}", store)
    own = "127.0.0.1" if host in ("127.0.0.1", "localhost", "::1") or _is_local() else None
    return _joined(distributed, store, rank, count, own, lambda: None)


def _is_local() -> bool:
    """Whether the launcher says that all ranks are on this machine."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def _joined(distributed: Any, store: Any, rank: int, count: int, host: str | None, check: Callable[[], None]) -> Peers:
    """host: this machine's name or address, as the others reach it; None: what it calls itself."""
    _await_all(store, rank, count, check)
    group = distributed.ProcessGroupGloo
    options = group._Options()
    options._devices = [group.create_device(hostname=host) if host else group.create_default_device()]
    options._timeout = timedelta(seconds=ARRIVAL_TIMEOUT)
    try:
        backend = group(store, rank, count, options)
    except RuntimeError as error:
        raise RankError(f"The ranks cannot connect to each other: {str(error).splitlines()[0]} Start again.") from None
    peers = Peers(backend, rank, count, rank_timeout())
    peers.reason_of = lambda other: _reason(store, other)
    peers.store = store
    return peers


def _await_all(store: Any, rank: int, count: int, check: Callable[[], None]) -> None:
    store.set(f"here/{rank}", "1")
    end = time.monotonic() + ARRIVAL_TIMEOUT
    for other in range(count):
        while not store.check([f"here/{other}"]):
            check()
            if time.monotonic() > end:
                raise RankError(
                    f"Rank {other} has not started within {ARRIVAL_TIMEOUT:g} s. Start it, or all anew.", other
                )
            time.sleep(0.02)


def say_why(peers: Peers, reason: str) -> None:
    """Leave a word for the others before this rank ends."""
    _quietly(lambda: peers.store.set(f"reason/{peers.rank}", reason))


def _reason(store: Any, rank: int) -> str | None:
    found = _quietly(lambda: store.get(f"reason/{rank}") if store.check([f"reason/{rank}"]) else None)
    return None if found is None else found.decode()


def _quietly(call: Callable[[], Any]) -> Any:
    """What a store says; None where it cannot be reached."""
    try:
        return call()
    except (RuntimeError, OSError):
        return None


def _distributed() -> Any:
    import torch.distributed as distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise ConfigError(
            "tensor_parallel needs torch.distributed with gloo, which this build of torch lacks. Install torch's own "
            "wheel, or leave tensor_parallel out."
        )
    return distributed
