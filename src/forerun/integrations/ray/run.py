"""`forerun serve --ray`: start Ray Serve, deploy the application, and drain it on SIGTERM."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from forerun.errors import ConfigError
from forerun.integrations.ray.connect import connected, reason_in
from forerun.integrations.ray.plan import RayOptions, ServePlan
from forerun.server.logs import LOGGER
from forerun.server.options import ServerOptions
from forerun.server.run import url_of

_APPLICATION = "forerun"
_TICK = 0.1
_log = logging.getLogger(LOGGER)


def serve_on_ray(plan: ServePlan, server: ServerOptions, options: RayOptions) -> None:
    """Serve until a signal ends it.

    Raises:
        ConfigError: the cluster does not answer, Serve runs there already, or a replica could not load the model.
    """
    with connected(options):
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if serve.status().proxies:
            raise ConfigError(
                "Ray Serve runs on that cluster already, with an address of its own. End it, or give another cluster."
            )
        logs = {"enable_access_log": False, "log_level": "WARNING"}
        http = {"host": server.host, "port": server.port, "keep_alive_timeout_s": 75}
        try:
            serve.start(proxy_location="EveryNode", http_options=http, logging_config=logs)
            ingress = _deploy(plan, logs)
            with _signals() as received:
                url = url_of(server.host, server.port)
                _log.info({"event": "ready", "url": url, "model": plan.name, "replicas": plan.replicas})
                while not received:
                    time.sleep(_TICK)
                _drain(ingress, received, server.drain_timeout)
        finally:
            serve.shutdown()
            _log.info({"event": "ended"})


def _deploy(plan: ServePlan, logs: dict[str, Any]) -> Any:
    """Deploy the application; return the handle of the ingress when all replicas have loaded the model."""
    from ray import serve

    from forerun.integrations.ray.application import build_application

    target = serve.RunTarget(build_application(plan), _APPLICATION, "/", logs)
    (ingress,) = serve.run_many([target], wait_for_applications_running=False)
    while not all_ready(serve.status().applications[_APPLICATION]):
        time.sleep(_TICK)
    return ingress


def all_ready(application: Any) -> bool:
    """Return whether all replicas of an application, in Ray's status of it, have loaded the model.

    One that dies meanwhile is replaced, though Ray calls that a failed deployment as long as it is not.

    Raises:
        ConfigError: the model cannot be loaded: one says so, or several have died of it.
    """
    deployments = application.deployments.values()
    messages = " ".join(each.message for each in deployments if each.message)
    failed = [each.status_trigger for each in deployments if each.status == "DEPLOY_FAILED"]
    given_up = application.status == "DEPLOY_FAILED" and not (failed and all(map("HEALTH_CHECK_FAILED".__eq__, failed)))
    if given_up or reason_in(messages) != messages:
        raise ConfigError(f"The replicas could not be started: {reason_in(messages or application.message)}")
    return bool(application.status == "RUNNING")


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Collect the names of signals instead of ending: the first one begins draining, the second ends it at once."""
    received: list[str] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    former = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _drain(ingress: Any, received: list[str], timeout: float) -> None:
    """Refuse new requests, and wait for the active ones."""
    end = time.monotonic() + timeout
    left = ingress.drain.remote().result(timeout_s=timeout + 1)
    _log.info({"event": "draining", "signal": received[0], "requests": left})
    while left and time.monotonic() < end and len(received) < 2:
        time.sleep(_TICK)
        left = ingress.drain.remote().result(timeout_s=timeout + 1)
    if left:
        _log.warning({"event": "cut", "requests": left})
