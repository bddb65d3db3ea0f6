"""Options of Ray, the plan of a server, and Ray's failures as ours."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.errors import ConfigError, PromptError, QueueFullError, ReplicaError
from forerun.integrations.ray.connect import connected, metrics_addresses, reason_in, to_forerun_error
from forerun.integrations.ray.plan import RayOptions, ServePlan, gpus_of, threads_of
from forerun.integrations.ray.run import all_ready
from forerun.server.options import ServerOptions
from forerun.server.protocol.errors import error_response


def plan(server: ServerOptions | None = None, **options: Any) -> ServePlan:
    ray = RayOptions(ray=True, **{"replica_threads": 1, **options})
    return ServePlan.of("bundled", "it", ["suffix"], {"max_batch": 4}, server or ServerOptions(), ray)


def test_flags_of_ray_are_for_ray() -> None:
    assert not RayOptions().ray
    for changed, value in {"replicas": 3, "ray_address": "a:1", "routing": "balanced", "replica_threads": 2}.items():
        with pytest.raises(ConfigError, match=f"The option {changed} is for --ray"):
            RayOptions(**{changed: value})  # type: ignore[arg-type]
    for wrong in ({"replicas": 0}, {"ray_timeout": 0.0}, {"routing": "random"}, {"replica_threads": 0}):
        with pytest.raises(ConfigError):
            RayOptions(ray=True, **wrong)  # type: ignore[arg-type]
    assert threads_of(RayOptions(ray=True, replicas=1000)) == 1


def test_what_replicas_are_made_by() -> None:
    made = plan(ServerOptions(max_queue=3), replicas=3)
    assert (made.replicas, made.threads, made.max_batch, made.server.max_queue) == (3, 1, 4, 3)
    assert gpus_of(made.llm) == 0 and gpus_of({"device": "cuda:1"}) == 1


def test_no_option_is_ignored() -> None:
    with pytest.raises(ConfigError, match="send_timeout"):
        plan(ServerOptions(send_timeout=3.0))
    with pytest.raises(ConfigError, match="--journal is for a single server"):
        plan(ServerOptions(journal=Path("file")))
    with pytest.raises(ConfigError, match="--remember is for a single server"):
        ServePlan.of("m", "m", "suffix", {"remember": "file"}, ServerOptions(), RayOptions(ray=True))


OWN = "A replica failed to start. Retrying 5 more time(s). Error:\nforerun.errors.ModelLoadError: no file\n"


@pytest.mark.parametrize(
    ("status", "engines", "message", "outcome"),
    [
        ("DEPLOYING", ("UPDATING", "CONFIG_UPDATE_STARTED"), "", False),
        (
            "DEPLOYING",
            ("UPDATING", "CONFIG_UPDATE_STARTED"),
            "The replica's actor died. Retrying.",
            False,
        ),
        ("DEPLOY_FAILED", ("DEPLOY_FAILED", "HEALTH_CHECK_FAILED"), "A replica's health check failed.", False),
        ("UNHEALTHY", ("UNHEALTHY", "HEALTH_CHECK_FAILED"), "A replica's health check failed.", False),
        ("RUNNING", ("HEALTHY", "CONFIG_UPDATE_COMPLETED"), "", True),
        ("DEPLOYING", ("UPDATING", "CONFIG_UPDATE_STARTED"), OWN, "started: no file"),
        (
            "DEPLOY_FAILED",
            ("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED"),
            "It failed 6 times.",
            "started: It failed 6 times",
        ),
        ("DEPLOY_FAILED", ("HEALTHY", "UNSPECIFIED"), "", "started: of the application"),
    ],
)
def test_a_replica_that_dies_before_all_are_ready_is_waited_for(
    status: str, engines: tuple[str, str], message: str, outcome: bool | str
) -> None:
    deployments = {
        "RayEngine": SimpleNamespace(status=engines[0], status_trigger=engines[1], message=message),
        "Ingress": SimpleNamespace(status="HEALTHY", status_trigger="CONFIG_UPDATE_COMPLETED", message=""),
    }
    application: Any = SimpleNamespace(status=status, message="of the application", deployments=deployments)
    if isinstance(outcome, bool):
        assert all_ready(application) is outcome
    else:
        with pytest.raises(ConfigError, match=outcome):
            all_ready(application)


def named(name: str, *bases: type[Exception]) -> type[Exception]:
    return type(name, bases or (Exception,), {})


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (named("ActorDiedError", named("RayActorError"))("gone"), ReplicaError, 503),
        (named("ActorUnavailableError")("gone"), ReplicaError, 503),
        (named("OutOfMemoryError")("node"), ReplicaError, 503),
        (named("DeploymentUnavailableError")("none"), ReplicaError, 503),
        (named("BackPressureError")("full"), QueueFullError, 429),
        (ValueError("a fault"), ValueError, 500),
        (PromptError("long"), PromptError, 400),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failures(error: Exception, kind: type[Exception], status: int) -> None:
    made = to_forerun_error(error)
    assert type(made) is kind and error_response(made)[0] == status
    assert ("lack of memory" in str(made)) == (type(error).__name__ == "OutOfMemoryError")


def test_why_a_replica_has_ended() -> None:
    guess = "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, (2) ..."
    told = str(to_forerun_error(named("RayActorError")(guess)))
    assert "has ended (it was killed or has crashed) before" in told and "memory" not in told
    known = "1 worker(s) were killed due to the node running low on memory. ..."
    assert "for lack of memory" in str(to_forerun_error(named("RayActorError")(known)))


def test_a_worker_s_own_error_is_unwrapped() -> None:
    wrapped = named("RayTaskError")("a traceback")
    wrapped.cause = ConfigError("the reason")  # type: ignore[attr-defined]
    assert str(to_forerun_error(wrapped)) == "the reason"


def test_the_reason_in_a_traceback() -> None:
    text = "ray::Engine.__init__()\n    forerun.errors.ModelLoadError: x is not there. Fetch it.\nIt happened 3 times"
    assert reason_in(text) == "x is not there. Fetch it." and reason_in("why") == "why"


def test_an_address_where_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    for wrong, said in ((f"127.0.0.1:{port}", "has answered at"), ("nowhere", "must be HOST:PORT")):
        options = RayOptions(ray=True, ray_address=wrong, ray_timeout=0.5, replica_threads=1)
        with pytest.raises(ConfigError, match=said), connected(options):
            pass


def test_where_metrics_are() -> None:
    nodes = [
        {"NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 5, "Alive": True},
        {"NodeManagerAddress": "10.0.0.2", "MetricsExportPort": 6, "Alive": False},
    ]
    assert metrics_addresses(nodes) == "http://10.0.0.1:5/metrics"
