"""The Ray Serve application: an ingress without reserved CPUs, and replicas with an engine each."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.engine import LLM
from forerun.integrations.ray.connect import metrics_addresses, to_forerun_error
from forerun.integrations.ray.ingress import Ingress
from forerun.integrations.ray.messages import ForwardedRequest
from forerun.integrations.ray.metrics import RayMetricFactory
from forerun.integrations.ray.plan import ROUTERS, ServePlan, gpus_of
from forerun.integrations.ray.replica import Replica
from forerun.server.logs import start_log
from forerun.server.metrics import HTTPMetrics
from forerun.server.service import Service

_LIVE_WITHIN = 5.0
"""Seconds in which replicas must return their state."""
_MARGIN = 16
"""Requests beyond the limit of a replica that still reach it: it refuses them as `forerun serve` does."""


class RayEngine(Replica):
    """A replica: the model, in a process of its own."""

    def __init__(self, plan: ServePlan) -> None:
        torch.set_num_threads(plan.threads)
        start_log(plan.server.log_format)
        llm = LLM(plan.model, drafter=plan.drafter, **plan.llm)
        service = Service(llm, plan.name, plan.server, RayMetricFactory(plan.name))
        super().__init__(service, f"{serve.get_replica_context().replica_id.unique_id}, process {os.getpid()}")

    def __del__(self) -> None:
        with suppress(AttributeError):  # the model could not be loaded
            self.close()


class RayReplicas:
    """The replicas, by Ray's handle of them. Converts Ray's exceptions into forerun's."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, forwarded: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """Send a request to a replica and yield its messages. Closing the generator ends the request.

        Raises:
            ReplicaError: the replica has ended, or there is none.
            QueueFullError: all replicas are busy, and too many requests wait.
        """
        handle = self._handle.options(stream=True, session_id=forwarded.prefix.session)
        answer = handle.answer.remote(forwarded)
        complete = False
        try:
            async for messages in answer:
                yield messages
            complete = True
        except Exception as error:
            raise to_forerun_error(error) from error
        finally:
            if not complete:
                answer.cancel()

    async def live(self) -> list[dict[str, Any]]:
        """Return the state of each engine; without those that do not answer."""
        try:
            found = await self._handle.broadcast("state").results_async(timeout_s=_LIVE_WITHIN, return_exceptions=True)
        except TimeoutError:
            return []
        return [each for each in found if isinstance(each, dict)]


@serve.ingress()  # type: ignore[untyped-decorator, unused-ignore]
class IngressReplica:
    """The ingress's process."""

    def __init__(self, engines: DeploymentHandle, plan: ServePlan) -> None:
        start_log(plan.server.log_format)
        metrics = HTTPMetrics(RayMetricFactory(plan.name))
        self._ingress = Ingress(RayReplicas(engines), plan.server, metrics, lambda: metrics_addresses(ray.nodes()))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def without_id(message: Message) -> None:
                if message["type"] == "http.response.start":  # Ray's proxy adds it, too
                    kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                    message = {**message, "headers": kept}
                await send(message)

            await self._ingress.app(scope, receive, without_id if scope["type"] == "http" else send)

        return app

    async def drain(self) -> int:
        """Refuse new requests from now on; return the number of active ones."""
        self._ingress.middleware.draining = True
        return self._ingress.middleware.num_active


def build_application(plan: ServePlan) -> serve.Application:
    """Build the application."""
    options = plan.server
    ongoing = plan.max_batch + options.max_queue + _MARGIN
    router = ROUTERS[plan.routing]
    kwargs = {"slack": plan.max_batch} if plan.routing == "prefix" else {}
    routing = RequestRouterConfig(request_router_class=router, request_router_kwargs=kwargs) if router else None
    engines = serve.deployment(
        RayEngine,
        name="RayEngine",
        num_replicas=plan.replicas,
        ray_actor_options={"num_cpus": plan.threads, "num_gpus": gpus_of(plan.llm)},
        max_ongoing_requests=ongoing,
        max_queued_requests=max(options.max_queue, 1),
        graceful_shutdown_timeout_s=options.drain_timeout,
        **({"request_router_config": routing} if routing else {}),
    )
    ingress = serve.deployment(
        IngressReplica,
        name="Ingress",
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=2 * plan.replicas * ongoing,
        graceful_shutdown_timeout_s=options.drain_timeout,
        max_constructor_retry_count=2,
    )
    return ingress.bind(engines.bind(plan), plan)
