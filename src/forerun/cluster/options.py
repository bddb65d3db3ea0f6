"""What commands may be told of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from forerun.errors import ConfigError
from forerun.fields import check_options, option

ROUTERS: Mapping[str, str | None] = MappingProxyType(
    {
        "prefix": "forerun.cluster.router.PrefixRouter",
        "session": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
        "balanced": None,
    }
)
"""By name, the class that Ray Serve is told of; None is its own choice: of two replicas the one with fewer requests."""


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
        if self.ray:
            return
        changed = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if changed:
            raise ConfigError(f"--{changed[0].replace('_', '-')} is for --ray. Add that, or leave it out.")
