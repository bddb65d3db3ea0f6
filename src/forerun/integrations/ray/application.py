"""The application of Ray Serve's: an ingress without a CPU of its own, and engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from forerun.engine import LLM
from forerun.integrations.ray.connect import metrics_addresses, translated
from forerun.integrations.ray.ingress import Ingress
from forerun.integrations.ray.messages import TOLD, ForwardedRequest
from forerun.integrations.ray.metrics import RayInstruments
from forerun.integrations.ray.plan import ROUTERS, ServePlan, gpus_of
from forerun.server.app import make_app
from forerun.server.logs import log_as_json
from forerun.server.metrics import HTTPMetrics
from forerun.server.middleware import App, Message, Receive, Scope, Send
from forerun.server.service import Service

# A replica: an engine, and the paths of `forerun serve` in front of it, called without HTTP.

_SIGN_AFTER = 5.0
"""Seconds without an answer after which a replica says that it is there."""
_LEAVES_WITHIN = 1.0
"""Seconds that a request has to end by itself when nobody waits for it any more."""


class Replica:
    """Answers requests.

    Args:
        name: of this replica, for the log.
    """

    def __init__(self, service: Service, name: str) -> None:
        self._service, self._name = service, name
        self._app: App = make_app(service, lambda: False)

    async def answer(self, asked: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """The answer, as the application sends it: all that is there at a time. To close it ends the request.

        Where nothing is there for a while, nothing is given first, as a sign that the request is computed here.
        """
        outbox: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        told: dict[str, Any] = {"replica": self._name}
        task = asyncio.create_task(self._run(asked, told, outbox, gone))
        sign = asyncio.get_running_loop().call_later(_SIGN_AFTER, outbox.put_nowait, {})
        try:
            ended = False
            while not ended:
                several = [await outbox.get()]
                sign.cancel()
                while not outbox.empty():
                    several.append(outbox.get_nowait())
                ended = None in several
                messages = [message for message in several if message]
                yield [*messages, {"type": TOLD, "told": told}] if ended else messages
            await task
        finally:
            sign.cancel()
            gone.set()
            try:
                await asyncio.wait((task,), timeout=_LEAVES_WITHIN)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def state(self) -> dict[str, Any]:
        """What the engine does now, and what the server cannot do."""
        return {"live": self._service.live(), "cannot": dict(self._service.limits())}

    def check_health(self) -> None:
        """Raise DeviceError if nothing can be computed here any more: Ray starts another replica in place of this."""
        self._service.llm.engine.faults.check()

    def close(self) -> None:
        """End what is being computed."""
        self._service.close()

    async def _run(
        self, asked: ForwardedRequest, told: dict[str, Any], outbox: asyncio.Queue[Message | None], gone: asyncio.Event
    ) -> None:
        """Call the application; None is the last that comes into the outbox."""
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            outbox.put_nowait(message)

        try:
            await self._app(_scope(asked, told), receive, send)
        finally:
            outbox.put_nowait(None)


def _scope(asked: ForwardedRequest, told: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.path.encode(),
        "root_path": "",
        "query_string": asked.query,
        "headers": [*asked.headers],
        "client": None,
        "server": None,
        "state": {"told": told, "request_id": asked.request_id, "tenant": asked.tenant},
    }


_LIVE_WITHIN = 5.0
"""Seconds in which replicas must say what they do."""
_MARGIN = 16
"""Requests beyond those that a replica takes: it is asked, and refuses them itself as `forerun serve` does."""


class RayEngine(Replica):
    """A replica: the model, in a process of its own."""

    def __init__(self, plan: ServePlan) -> None:
        torch.set_num_threads(plan.threads)
        log_as_json()
        llm = LLM(plan.model, drafter=plan.drafter, **plan.llm)
        service = Service(llm, plan.name, plan.server, RayInstruments(plan.name))
        super().__init__(service, f"{serve.get_replica_context().replica_id.unique_id}, process {os.getpid()}")

    def __del__(self) -> None:
        with suppress(AttributeError):  # the model could not be loaded
            self.close()


class RayReplicas:
    """The engines, by Ray's handle of them. Ray's exceptions become forerun's here."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def answer(self, asked: ForwardedRequest) -> AsyncGenerator[list[Message], None]:
        """What one of them answers, as it comes; perhaps nothing at first. To close it ends the request.

        Raises:
            ReplicaError: it has ended, or there is none.
            QueueFullError: all are busy, and too many wait.
        """
        handle = self._handle.options(stream=True, session_id=asked.prefix.session)
        answer = handle.answer.remote(asked)
        complete = False
        try:
            async for messages in answer:
                yield messages
            complete = True
        except Exception as error:
            raise translated(error) from error
        finally:
            if not complete:
                answer.cancel()

    async def live(self) -> list[dict[str, Any]]:
        """What the engine of each does now; those that do not answer are left out."""
        try:
            found = await self._handle.broadcast("state").results_async(timeout_s=_LIVE_WITHIN, return_exceptions=True)
        except TimeoutError:
            return []
        return [each for each in found if isinstance(each, dict)]


@serve.ingress()  # type: ignore[untyped-decorator, unused-ignore]
class IngressReplica:
    """The ingress's process."""

    def __init__(self, engines: DeploymentHandle, plan: ServePlan) -> None:
        log_as_json()
        metrics = HTTPMetrics(RayInstruments(plan.name))
        self._ingress = Ingress(RayReplicas(engines), plan.server, metrics, lambda: metrics_addresses(ray.nodes()))

    def __serve_build_asgi_app__(self) -> App:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            async def without_id(message: Message) -> None:
                if message["type"] == "http.response.start":  # Ray's proxy adds it, too
                    kept = [(name, value) for name, value in message["headers"] if name != b"x-request-id"]
                    message = {**message, "headers": kept}
                await send(message)

            await self._ingress.app(scope, receive, without_id if scope["type"] == "http" else send)

        return app

    async def drain(self) -> int:
        """Refuse new requests from now on; how many are under way."""
        self._ingress.gate.draining = True
        return self._ingress.gate.num_active


def build(plan: ServePlan) -> serve.Application:
    """The application."""
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
        max_constructor_retry_count=2,
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
