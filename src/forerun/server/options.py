"""Options of the server beside those of its LLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from forerun.errors import ConfigError
from forerun.server.logs import LOG_FORMATS, TEXT
from forerun.utils.fields import check_options, documented, option

OLLAMA_PORT = 11434
_HOST = re.compile(r"(?:\[([\da-f:.]+)\]|([\w.-]+))(?::\d*)?|([\da-f:.]+)", re.IGNORECASE)


def host_of(authority: str) -> str:
    """Return the name or address in small letters, without brackets and port; empty for what is neither."""
    found = _HOST.fullmatch(authority)
    return "".join(filter(None, found.groups())).lower() if found else ""


def is_loopback(host: str) -> bool:
    """Return whether a name or address is always this machine: localhost, 127.0.0.0/8, ::1."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


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
    metrics_key: str | None = option(
        None, "The only key that reads /metrics and /live; without it, API keys do on this machine.", metavar="KEY"
    )
    allowed_host: Sequence[str] = option(
        (), "A name or address by which clients without a key may call the server; * is every one.", metavar="HOST"
    )
    cors_origin: Sequence[str] = option(
        (), "An origin whose pages may call the server from a browser; * is every one.", metavar="ORIGIN"
    )
    max_queue: int = option(256, "Choices that may wait beyond --max-batch; requests beyond that are refused.", low=0)
    trust_priority: bool = option(
        False, "Let a request's priority count among the requests of all keys, not of its own key alone."
    )
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
    response_template: Path | None = option(
        None,
        "How the model writes thinking and calls, a response template of Transformers as JSON; else as the chat "
        "template does.",
        metavar="FILE",
    )
    log_format: str = option(
        TEXT, "The log on standard error: a line of text a request, or an object as JSON.", choices=LOG_FORMATS
    )
    log_prompts: bool = option(False, "Log the text of prompts and answers, which is left out otherwise.")

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        keys = [*self.api_key, *([] if self.metrics_key is None else [self.metrics_key])]
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
            raise ConfigError("A key is empty, or holds blanks or other characters than those of ASCII.")
        if self.metrics_key in self.api_key:
            raise ConfigError("metrics_key is an api_key, too. Give it a key of its own.")
        for host in self.allowed_host:
            if host != "*" and not host_of(host):
                raise ConfigError(f"allowed_host is {host!r}, but must be a name or address, such as nas.lan.")

    @property
    def is_open(self) -> bool:
        """Return whether other machines may call it without a key."""
        return not is_loopback(self.host) and not self.api_key
