"""From a name to a model that several ranks compute: this process is the leader, others are started or were found."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any, NoReturn

import torch

from forerun.config import DEFAULT_DTYPE, KERNELS_VARIABLE, TRITON
from forerun.errors import ConfigError, ForerunError, UnsupportedModelError
from forerun.kernels.triton.availability import wants_triton
from forerun.models.exactness import probe, self_test
from forerun.models.loading import served_kind, tell_of_source
from forerun.models.model import Model
from forerun.models.quantising import check_quantisation
from forerun.models.reading import check_dtype
from forerun.models.sharded.building import Plan, build, embeddings
from forerun.models.sharded.conductor import Conductor, LeaderEntrance
from forerun.models.sharded.follower import Follower, FollowerEntrance
from forerun.models.sharded.likeness import facts
from forerun.models.sharded.model import ShardedModel
from forerun.models.sharded.shard import Shard
from forerun.models.sources import find_source
from forerun.ranks.facts import compare
from forerun.ranks.joining import join_by_file, join_by_launcher, launched_rank, say_why
from forerun.ranks.peers import LEADER, LOADING_TIMEOUT, Peers, rank_timeout
from forerun.ranks.process_state import end_stopped
from forerun.ranks.spawned import PATIENCE, Spawned
from forerun.ranks.watch import end_with_parent, leave

MODULE = "forerun.models.sharded.rank"
"""What a spawned rank runs."""


def check_tensor_parallel(tensor_parallel: int, device: str, adapter: object) -> None:
    """Refuse what several ranks cannot do.

    Raises:
        ConfigError: says what, and what to do.
    """
    if isinstance(tensor_parallel, bool) or not isinstance(tensor_parallel, int) or tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel is {tensor_parallel!r}, but must be the number of ranks, at least 1.")
    if tensor_parallel == 1:
        return
    launched = launched_rank()
    if launched is not None and launched[1] != tensor_parallel:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}, but the launcher has started {launched[1]} ranks (WORLD_SIZE). "
            "Give one number to both."
        )
    if torch.device(device).type != "cpu":
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel} and device {device!r}, but ranks compute on the CPU only: sharing a "
            "model out among accelerators has not been tried. Give device='cpu', or leave tensor_parallel out."
        )
    if wants_triton():
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel} and {KERNELS_VARIABLE} {TRITON}, but ranks compute on the CPU, "
            f"where those kernels do not. Unset {KERNELS_VARIABLE}, or leave tensor_parallel out."
        )
    if adapter is not None:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel} and there is an adapter, which is merged into whole weights only. "
            "Merge it into a folder of its own (PEFT's merge_and_unload and save_pretrained), and load that."
        )


def load_sharded_model(
    name: str | Path, dtype: str = DEFAULT_DTYPE, tensor_parallel: int = 2, quantize: str | None = None
) -> ShardedModel:
    """Load a causal language model of the Llama family that so many ranks compute together on CPUs, and try whether it
    is exact. This process is rank 0; the others are started by it, and end with it.

    Under torchrun all ranks are there, and all call this. On rank 0 it returns; on the others it computes what rank 0
    asks for, and ends the process with rank 0.

    Args:
        dtype, quantize: as `load_model`.
        tensor_parallel: the number of ranks, at least 2 and at most the number of key heads.

    Raises:
        ConfigError, ModelLoadError: as `load_model`.
        UnsupportedModelError: the model is not of the Llama family, or cannot be cut.
        RankError: the ranks differ, or one of them could not start or has been lost.
    """
    plan = plan_of(name, dtype, quantize)
    for rank in range(tensor_parallel):
        Shard.of(plan.config, rank, tensor_parallel)
    rank_timeout()
    launched = launched_rank()
    if launched is not None:
        end_with_parent()
        peers = join_by_launcher(*launched)
        peers.when_lost.append(lambda error: end_stopped(peers.processes))
        if not peers.is_leader:
            _follow_and_exit(plan, peers)
        return lead(plan, peers, None, name)
    torch.set_num_threads(max(1, torch.get_num_threads() // tensor_parallel))
    options = {
        "name": str(name), "dtype": dtype, "quantize": quantize, "count": tensor_parallel,
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    spawned = Spawned(MODULE, tensor_parallel, options)
    try:
        peers = join_by_file(spawned.store, LEADER, tensor_parallel, spawned.check)
        return lead(plan, peers, spawned, name)
    except BaseException:
        spawned.end(0)
        raise


def follow(plan: Plan, peers: Peers) -> None:
    """Be one of the other ranks, until the leader ends.

    Raises:
        RankError: another rank is lost.
    """
    with peers.patient(LOADING_TIMEOUT):
        compare(peers, facts(plan, peers.count))
        entrance = FollowerEntrance(peers)
        model = build(Model, plan, Shard.of(plan.config, peers.rank, peers.count), peers, entrance)
        peers.agree(True)  # all have read their weights
    probe(model)
    self_test(model, peers.agree)
    Follower(model, entrance, peers).run()


def plan_of(name: str | Path, dtype: str, quantize: str | None) -> Plan:
    """What is to be loaded; see `load_sharded_model`."""
    check_dtype(dtype)
    asked = check_quantisation(quantize, dtype)
    source = find_source(name)
    config: Any = source.config()
    if served_kind("auto", source, config) != "llama":
        raise UnsupportedModelError(
            f"{source.name} ({config.model_type}) is not of the Llama family, whose layers alone are shared out among "
            "ranks. Leave tensor_parallel out."
        )
    if source.output_tokens(config) is not None:
        raise UnsupportedModelError(
            f"{source.name} proposes a part of its vocabulary, and is not shared out among ranks. Leave "
            "tensor_parallel out."
        )
    return Plan.of(source, config, dtype, asked or check_quantisation(source.quantisation(), dtype))


def lead(plan: Plan, peers: Peers, spawned: Spawned | None, name: str | Path) -> ShardedModel:
    """Be the leader. spawned: the others, where this process has started them.

    Raises:
        RankError: another rank is lost, or differs.
    """
    with peers.patient(LOADING_TIMEOUT):
        compare(peers, facts(plan, peers.count))
        entrance = LeaderEntrance(embeddings(plan))
        model = build(ShardedModel, plan, Shard.of(plan.config, LEADER, peers.count), peers, entrance)
        peers.agree(True)
    conductor = Conductor(peers, model.pool)
    model.conductor = entrance.conductor = conductor
    probe(model)
    tell_of_source(plan.source, model, name)
    model.exactness = self_test(model, peers.agree)
    model.pool.page_nbytes = model.pool.page_nbytes * plan.config.num_key_value_heads // _own_heads(plan, peers)
    conductor.start()
    model._end = weakref.finalize(model, _end, conductor, spawned)
    return model


def _own_heads(plan: Plan, peers: Peers) -> int:
    first, last = Shard.of(plan.config, peers.rank, peers.count).kv_heads
    return last - first


def _end(conductor: Conductor, spawned: Spawned | None) -> None:
    conductor.close()
    if spawned is not None:
        spawned.end(PATIENCE if conductor.peers.lost is None else 0.0)


def _follow_and_exit(plan: Plan, peers: Peers) -> NoReturn:
    try:
        follow(plan, peers)
    except Exception as error:
        end_rank(peers.rank, peers, error)
    sys.exit(0)


def end_rank(rank: int, peers: Peers | None, error: Exception) -> NoReturn:
    """End a process that is another rank than the first, and let the others know why, unless they were lost first."""
    reason = str(error) if isinstance(error, ForerunError) else f"{type(error).__name__}: {error}"
    if peers is not None and error is not peers.lost:
        say_why(peers, reason)
    leave(f"rank {rank}: {reason}")
