"""Ray itself: whether it is there, and a cluster of this run's own or one that is joined."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from typing import Any

from forerun.errors import ConfigError, ForerunError, QueueFullError, ReplicaError
from forerun.integrations.ray.plan import RayOptions, threads_of

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # lines of a log are not left out because they are alike
    "RAY_COLOR_PREFIX": "0",
}
"""Of Ray, where the user has not set them."""
_OWN_ENVIRONMENT = {
    # The ingress speaks gRPC with the replicas: a stream takes half the processor time of Ray's own calls. All nodes of
    # a cluster must agree on it, so one that is joined is left as it is.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 30),  # the gate limits bodies; answers are not limited
}
"""The same, for a cluster of this run's own."""
_OBJECT_STORE = 256 << 20
"""Bytes for objects in shared memory: requests and answers are small."""


@contextmanager
def connected(options: RayOptions) -> Iterator[None]:
    """A cluster, until the end: one of this run's own, or the one at an address.

    Raises:
        ConfigError: nothing answers at the address in time, or there are too few CPUs for the replicas.
    """
    needed = options.replicas * threads_of(options)
    if options.ray_address is not None and options.ray_address != "auto":
        _knock(options.ray_address, options.ray_timeout)
    environment = _ENVIRONMENT if options.ray_address is not None else _ENVIRONMENT | _OWN_ENVIRONMENT
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if options.ray_address is None and "RAY_AUTH_MODE" not in os.environ:
        # the cluster belongs to this process and its children, and to nobody else who can reach its ports
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    started: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.ERROR}
    if options.ray_address is None:
        ray.init(
            "local",
            num_cpus=needed,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE,
            **started,
        )
    else:
        _join(options.ray_address, options.ray_timeout, started)
    try:
        there = ray.cluster_resources().get("CPU", 0)
        if there < needed:
            raise ConfigError(
                f"{options.replicas} replicas of {threads_of(options)} CPUs need {needed}, but the cluster has "
                f"{there:g}. Give fewer --replicas or --replica-threads."
            )
        yield
    finally:
        ray.shutdown()


def metrics_addresses(nodes: Seq[Mapping[str, Any]]) -> str:
    """Where Ray tells the metrics of these nodes."""
    return ", ".join(
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in nodes if node["Alive"]
    )


def _join(address: str, timeout: float, started: Mapping[str, Any]) -> None:
    import ray

    failure: list[BaseException] = []

    def join() -> None:
        try:
            ray.init(address, **started)
        except BaseException as error:
            failure.append(error)

    # Ray waits for a minute and more, and cannot be told to wait less
    thread = threading.Thread(target=join, name="forerun-join", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise _silent(address, timeout)
    if failure:
        reason = str(failure[0]).strip().splitlines()[0] if str(failure[0]).strip() else type(failure[0]).__name__
        raise ConfigError(f"The Ray cluster at {address} cannot be joined: {reason}")


def _knock(address: str, timeout: float) -> None:
    """Raise ConfigError unless somebody listens at the address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--ray-address is {address!r}, but must be HOST:PORT, or auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except OSError:
        raise _silent(address, timeout) from None


def _silent(address: str, timeout: float) -> ConfigError:
    return ConfigError(
        f"Nothing that is a Ray cluster has answered at {address} within {timeout:g} seconds. Correct --ray-address, "
        "give a longer --ray-timeout, or leave the address out for a cluster on this machine."
    )


# Ray's exceptions as forerun's. They are known by name, so that Ray need not be there to tell them apart.

_LOST = {
    "RayActorError",
    "ActorUnavailableError",
    "ReplicaUnavailableError",
    "DeploymentUnavailableError",
    "WorkerCrashedError",
    "NodeDiedError",
    "OwnerDiedError",
    "ObjectLostError",
    "RequestCancelledError",
    "TaskCancelledError",
}
_MEMORY = "OutOfMemoryError"
_FULL = "BackPressureError"


_OWN = re.compile(r"^\s*forerun\.errors\.\w+: (.+)$", re.MULTILINE)


def reason_in(text: str) -> str:
    """What a traceback of Ray's says of forerun's own exception; the whole text where it says nothing of one."""
    found = _OWN.findall(text)
    return found[-1] if found else text


def translated(error: BaseException) -> BaseException:
    """What a request has failed with: forerun's own exception where Ray's says why, else the exception itself.

    An exception of forerun's that a worker has raised comes as the cause of one of Ray's.
    """
    cause = getattr(error, "cause", None)
    if isinstance(cause, ForerunError):
        return cause
    if isinstance(error, ForerunError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    if _FULL in names:
        return QueueFullError("All replicas are busy, and as many requests wait as may. Send it again later.")
    if _MEMORY in names or _LOST & names:
        why = " for want of memory" if _MEMORY in names or "OOM" in str(error) else ""
        return ReplicaError(
            f"The replica that computed the request has ended{why} before its answer was whole. Send it again."
        )
    return error
