"""A server on Ray as plain values: what `serve run` is told in a file, and what the command tells by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from forerun.cluster.options import RayOptions, check_routing
from forerun.config import EngineConfig
from forerun.errors import ConfigError
from forerun.server.options import ServerOptions

_LEFT_OUT = ("host", "port", "journal", "journal_size")
"""Of the server's options, those of Ray's own proxy, and of what replicas do not write."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is served, by how many replicas.

    Attributes:
        drafter: texts of drafters, or one.
        name: what requests call the model.
        llm: other options of `LLM`.
        server: options of the server but host and port.
        threads: of each replica; as many CPUs are reserved for it.
    """

    model: str
    name: str
    drafter: str | list[str]
    llm: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict)
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
        told = {name: value for name, value in asdict(server).items() if name not in _LEFT_OUT}
        told = {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}
        return cls(model, name, drafter, llm, told, ray.replicas, threads_of(ray), ray.routing)

    @classmethod
    def parsed(cls, values: Mapping[str, Any]) -> Plan:
        """From a file's values. Raises ConfigError."""
        known = {each.name for each in fields(cls)}
        odd, missing = sorted(values.keys() - known), sorted({"model", "name", "drafter"} - values.keys())
        if odd or missing:
            wrong = f"{', '.join(odd)} is unknown" if odd else f"{', '.join(missing)} is missing"
            raise ConfigError(f"The arguments of forerun's application: {wrong}. `--write-config` writes them.")
        made = cls(**values)
        check_routing(made.routing)
        made.server_options()
        return made

    def server_options(self) -> ServerOptions:
        """Raises ConfigError."""
        try:
            return ServerOptions(**self.server)
        except TypeError as error:
            raise ConfigError(f"The server's options: {error}.") from None

    @property
    def max_batch(self) -> int:
        """Sequences that a replica computes together."""
        return int(self.llm.get("max_batch", EngineConfig().max_batch))

    @property
    def gpus(self) -> int:
        """Of each replica."""
        return gpus_of(self.llm)


def threads_of(options: RayOptions) -> int:
    """CPUs of each replica or worker."""
    return options.replica_threads or max(1, len(os.sched_getaffinity(0)) // options.replicas)


def gpus_of(llm: Mapping[str, Any]) -> int:
    """Of each replica or worker. llm: options of `LLM`."""
    return int(str(llm.get("device", "cpu")).startswith("cuda"))
