"""`forerun serve --ray`: replicas on Ray, or the configuration from which Ray's own command starts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
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
    write_to: Path | None,
) -> None:
    """Serve, or write the configuration.

    Raises:
        ConfigError: Ray is not there, its cluster does not answer, or an option cannot be had with it.
    """
    from forerun.cluster.config_file import write_config
    from forerun.cluster.plan import Plan

    plan = Plan.of(model, name, drafters, llm, server, ray)
    if write_to is not None:  # for a machine that has Ray, which this one need not have
        write_config(write_to, plan, server)
        note(f"{write_to}: start it with `serve run {write_to}`, on a machine of the cluster")
        if server.api_key:
            note(f"{write_to} holds the keys; only you can read it")
        return
    note_untried("Ray")
    from forerun.cluster.run import serve_on_ray
    from forerun.server.logs import log_as_json
    from forerun.server.run import bound_socket

    with bound_socket(server) as listening:  # a port that is taken is told of before anything is started
        server = replace(server, port=listening.getsockname()[1])
    note(f"starting {ray.replicas} replicas of {model}")
    log_as_json()
    serve_on_ray(plan, server, ray)
