"""Connection to a Ray cluster, a local or an existing one, and Ray's exceptions as forerun's."""

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
"""Environment variables of Ray, unless the user has set them."""
_OWN_ENVIRONMENT = {
    # The ingress speaks gRPC with the replicas: a stream takes half the processor time of Ray's own calls. All nodes of
    # a cluster must agree on it, so they are not set for an existing one.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 30),  # the middleware limits bodies; answers are not limited
}
"""The same, for a cluster that this run starts."""
_OBJECT_STORE = 256 << 20
"""Bytes for objects in shared memory: requests and answers are small."""


@contextmanager
def connected(options: RayOptions) -> Iterator[None]:
    """Connect to a cluster until the end: to the one at an address, or to a new local one.

    Raises:
        ConfigError: nothing answers at the address in time, or there are too few CPUs for the replicas.
    """
    needed = options.replicas * threads_of(options)
    if options.ray_address is not None and options.ray_address != "auto":
        _check_listening(options.ray_address, options.ray_timeout)
    environment = _ENVIRONMENT if options.ray_address is not None else _ENVIRONMENT | _OWN_ENVIRONMENT
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    if options.ray_address is None and "RAY_AUTH_MODE" not in os.environ:
        # only this process and its children may use the cluster, not others who can reach its ports
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
        available = ray.cluster_resources().get("CPU", 0)
        if available < needed:
            raise ConfigError(
                f"{options.replicas} replicas of {threads_of(options)} CPUs need {needed}, but the cluster has "
                f"{available:g}. Give fewer --replicas, or decrease the key replica_threads of the "
                "configuration file."
            )
        yield
    finally:
        ray.shutdown()


def metrics_addresses(nodes: Seq[Mapping[str, Any]]) -> str:
    """Return the URLs at which Ray exports the metrics of these nodes."""
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

    # Ray waits for a minute and more, without an option to wait less
    thread = threading.Thread(target=join, name="forerun-join", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        raise _no_answer(address, timeout)
    if failure:
        reason = str(failure[0]).strip().splitlines()[0] if str(failure[0]).strip() else type(failure[0]).__name__
        raise ConfigError(f"The Ray cluster at {address} cannot be joined: {reason}")


def _check_listening(address: str, timeout: float) -> None:
    """Raise ConfigError unless something listens at the address."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"--ray-address is {address!r}, but must be HOST:PORT, or auto.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()
    except OSError:
        raise _no_answer(address, timeout) from None


def _no_answer(address: str, timeout: float) -> ConfigError:
    return ConfigError(
        f"Nothing that is a Ray cluster has answered at {address} within {timeout:g} seconds. Correct --ray-address, "
        "or leave the address out for a local cluster."
    )


# Ray's exceptions are known by name, so that Ray need not be installed.

_LOST = {
    "OutOfMemoryError",
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
_OWN = re.compile(r"^\s*forerun\.errors\.\w+: (.+)$", re.MULTILINE)


def reason_in(text: str) -> str:
    """Return the message of forerun's own exception in a traceback of Ray's; the whole text if there is none."""
    found = _OWN.findall(text)
    return found[-1] if found else text


def to_forerun_error(error: BaseException) -> BaseException:
    """Return forerun's exception for one of Ray's; the exception itself if there is none.

    An exception of forerun's that a worker has raised is the cause of one of Ray's.
    """
    for each in (getattr(error, "cause", None), error):
        if isinstance(each, ForerunError):
            return each
    names = {kind.__name__ for kind in type(error).__mro__}
    if "BackPressureError" in names:
        return QueueFullError("All replicas are busy, and as many requests wait as may. Send it again later.")
    if _LOST & names:
        why = " (it was killed or has crashed)" if "OOM killer" in str(error) else ""  # Ray names what it may have been
        if "OutOfMemoryError" in names or "running low on memory" in str(error):
            why = " for lack of memory"
        return ReplicaError(
            f"The replica that computed the request has ended{why} before its answer was complete. Send it again."
        )
    return error
