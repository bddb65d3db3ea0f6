"""Options of Ray, and the plan of a server on Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.server.options import ServerOptions
from forerun.utils.fields import check_options, option
from forerun.utils.machine import performance_cores

ROUTERS: Mapping[str, str | None] = MappingProxyType(
    {
        "prefix": "forerun.integrations.ray.router.PrefixRouter",
        "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        "balanced": None,
    }
)
"""Name -> router class of Ray Serve; None is its default: of two replicas the one with fewer requests."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Whether and how Ray is used."""

    ray: bool = option(False, "Use Ray (extra `ray`): several replicas, each in a process of its own.")
    replicas: int = option(2, "Replicas, or workers of a batch.", low=1)
    ray_address: str | None = option(
        None,
        "HOST:PORT of a cluster to join, or 'auto' for one on this machine.",
        metavar="ADDRESS",
        default_text="a cluster for this run alone, on this machine",
    )
    ray_timeout: float = option(60.0, "Seconds in which a cluster must have answered.", low=0, above=True)
    replica_threads: int | None = option(
        None, "CPUs of each replica, and its threads.", low=1, default_text="this machine's, divided by the replicas"
    )
    routing: str = option(
        "prefix",
        "Which replica a request goes to: 'prefix', which has computed most of its prompt; 'session', by the header "
        "x-session-id alone; 'balanced', which has fewer requests.",
    )

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.routing not in ROUTERS:
            raise ConfigError(f"routing is {self.routing!r}, but must be one of {', '.join(ROUTERS)}.")
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if changed and not self.ray:
            raise ConfigError(f"The option {changed[0]} is for --ray. Add --ray, or leave it out.")


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A model with its options and its replicas.

    Attributes:
        drafter: texts of drafters, or one.
        name: name of the model in requests.
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
    ) -> ServePlan:
        """Make a plan from the options of the command.

        Raises:
            ConfigError: an option is not supported on Ray.
        """
        if server.send_timeout != ServerOptions().send_timeout:
            raise ConfigError(
                "The key send_timeout is for a server without --ray: Ray's proxy sends answers. Leave it out."
            )
        if server.journal is not None:
            raise ConfigError("--journal is for a single server, and --ray starts several. Leave it out.")
        if llm.get("remember") is not None:
            raise ConfigError("--remember is for a single server, and --ray starts several. Leave it out.")
        return cls(model, name, drafter, llm, server, ray.replicas, threads_of(ray), ray.routing)

    @property
    def max_batch(self) -> int:
        """Return the number of sequences that a replica computes together."""
        return int(self.llm.get("max_batch", EngineConfig().max_batch))


def threads_of(options: RayOptions) -> int:
    """Return the CPUs of each replica or worker."""
    return options.replica_threads or max(1, performance_cores() // options.replicas)


def gpus_of(llm: Mapping[str, Any]) -> int:
    """Return the GPUs of each replica or worker. llm: options of `LLM`."""
    return int(str(llm.get("device", "cpu")).startswith("cuda"))
