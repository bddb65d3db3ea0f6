"""What a server on Ray serves, by how many replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.cluster.options import RayOptions
from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.server.options import ServerOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """What is served, by how many replicas.

    Attributes:
        drafter: texts of drafters, or one.
        name: what requests call the model.
        llm: other options of `LLM`.
        server: options of the server; host and port are those of Ray's own proxy.
        threads: of each replica; as many CPUs are reserved for it.
    """

    model: str
    name: str
    drafter: str | list[str]
    llm: Mapping[str, Any] = field(default_factory=dict)
    server: ServerOptions = field(default_factory=ServerOptions)
    replicas: int = 2
    threads: int = 1
    routing: str = "prefix"

    @classmethod
    def of(
        cls,
        model: str,
        name: str,
        drafter: str | list[str],
        llm: dict[str, Any],
        server: ServerOptions,
        ray: RayOptions,
    ) -> Plan:
        """As the command's options say.

        Raises:
            ConfigError: an option that Ray's proxy has no place for.
        """
        if server.send_timeout != ServerOptions().send_timeout:
            raise ConfigError("--send-timeout is for a server without --ray: Ray's proxy sends answers. Leave it out.")
        if server.journal is not None:
            raise ConfigError("--journal is one server's, and --ray starts several. Leave it out.")
        return cls(model, name, drafter, llm, server, ray.replicas, threads_of(ray), ray.routing)

    @property
    def max_batch(self) -> int:
        """Sequences that a replica computes together."""
        return int(self.llm.get("max_batch", EngineConfig().max_batch))


def threads_of(options: RayOptions) -> int:
    """CPUs of each replica or worker."""
    return options.replica_threads or max(1, len(os.sched_getaffinity(0)) // options.replicas)


def gpus_of(llm: Mapping[str, Any]) -> int:
    """Of each replica or worker. llm: options of `LLM`."""
    return int(str(llm.get("device", "cpu")).startswith("cuda"))
