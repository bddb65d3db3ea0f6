"""`forerun serve --ray`: replicas on Ray."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.cli.memory_line import note, note_untried
from forerun.cluster.options import RayOptions
from forerun.server.options import ServerOptions


def serve_replicas(
    model: str,
    name: str,
    drafters: str | list[str],
    llm: dict[str, Any],
    server: ServerOptions,
    ray: RayOptions,
) -> None:
    """Serve.

    Raises:
        ConfigError: Ray is not there, its cluster does not answer, or an option cannot be had with it.
    """
    from forerun.cluster.plan import Plan

    plan = Plan.of(model, name, drafters, llm, server, ray)
    note_untried("Ray")
    from forerun.cluster.run import serve_on_ray
    from forerun.server.logs import log_as_json
    from forerun.server.run import bound_socket

    with bound_socket(server) as listening:  # a port that is taken is told of before anything is started
        server = replace(server, port=listening.getsockname()[1])
    note(f"starting {ray.replicas} replicas of {model}")
    log_as_json()
    serve_on_ray(plan, server, ray)
