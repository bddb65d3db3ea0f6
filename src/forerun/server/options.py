"""Options of the server beside those of its LLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ConfigError
from forerun.utils.fields import check_options, documented, option

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@documented
@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server listens, who may call it, and its limits.

    None stands for the default of every field.
    """

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 lets other machines in.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    api_key: Sequence[str] = option(
        (), "A key that clients may send as a bearer token; without any, everybody is let in.", metavar="KEY"
    )
    cors_origin: Sequence[str] = option(
        (), "An origin whose pages may call the server from a browser; * is every one.", metavar="ORIGIN"
    )
    max_queue: int = option(256, "Choices that may wait beyond --max-batch; requests beyond that are refused.", low=0)
    max_body: float = option(4.0, "MiB of a request's body; a larger one is refused unread.", low=0, above=True)
    max_prompts: int = option(256, "Choices that one request may ask for, of all of its prompts.", low=1)
    body_timeout: float = option(30.0, "Seconds in which a request's body must have come.", low=0, above=True)
    request_timeout: float = option(
        3600.0, "Seconds after which a request that is not finished is ended.", low=0, above=True
    )
    send_timeout: float = option(
        60.0, "Seconds for which a client may read nothing of its stream before it is cut.", low=0, above=True
    )
    drain_timeout: float = option(
        120.0, "Seconds that requests have to finish after SIGTERM; those that have not are cut.", low=0
    )
    journal: Path | None = option(
        None,
        "Keep figures of every answer in this file, without any text, for `forerun bench report`; a request's "
        "category is a word in its header X-Forerun-Category.",
        metavar="FILE",
    )
    journal_size: float = option(
        64.0, "MiB of --journal and its older part FILE.1 together; what is older is dropped.", low=1
    )
    log_prompts: bool = option(False, "Log the text of prompts and answers, which is left out otherwise.")

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_key):
            raise ConfigError("An api_key is empty, or holds blanks or other characters than those of ASCII.")

    @property
    def is_open(self) -> bool:
        """Return whether other machines may call it without a key."""
        return self.host not in LOOPBACK and not self.api_key
