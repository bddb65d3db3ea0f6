"""Completions of a server that speaks OpenAI's API, and its counters of drafts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forerun.errors import AuditError, ConfigError

TIMEOUT = 120.0
"""Seconds for one answer."""
_COUNTER = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """One response.

    Attributes:
        texts: of its choices.
        num_drafted: draft tokens verified for it, where the response tells.
    """

    texts: tuple[str, ...]
    num_drafted: int | None


class Server:
    """One way to ask a server: with the switch, or without.

    Args:
        url: with or without /v1.
        api_key: sent as a bearer token; None sends none.
        model: what requests call it; None asks the server.
        extra: fields of every body, such as the switch.
    """

    def __init__(
        self, url: str, api_key: str | None = None, model: str | None = None, extra: Mapping[str, Any] | None = None
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError:
            raise ConfigError(
                "An audit of a server needs httpx, which is not installed: pip install 'forerun[audit]'"
            ) from None
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {url!r}, but must begin with http:// or https://.")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._error = httpx.HTTPError
        self._http = httpx.Client(timeout=TIMEOUT, headers=headers, limits=httpx.Limits(max_connections=32))
        self.extra = dict(extra or {})
        self.model = model or self._first_model()

    def complete(self, bodies: Seq[Mapping[str, Any]], at_once: int = 1) -> list[Answer]:
        """The answers to bodies of /v1/completions, so many at a time.

        Raises:
            AuditError: the server does not answer, or refuses a body.
        """
        if at_once == 1:
            return [self._complete(body) for body in bodies]
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(self._complete, bodies))

    def counter(self) -> float | None:
        """Draft tokens verified since the server started, by its /metrics; None where it does not tell."""
        try:
            response = self._http.get(f"{self.url}/metrics")
        except self._error:
            return None
        if response.status_code != 200:
            return None
        return draft_counter(response.text)

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def _complete(self, body: Mapping[str, Any]) -> Answer:
        found = self._json("POST", "/v1/completions", {"model": self.model, **body, **self.extra})
        choices = found.get("choices")
        if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
            raise AuditError(f"{self.url} answered without choices. Is it an OpenAI-compatible server?")
        texts = tuple(str(one.get("text", "")) for one in sorted(choices, key=lambda one: one.get("index", 0)))
        metrics = found.get("metrics")
        told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        drafted = told.get("num_draft_tokens") if isinstance(told, dict) else None
        return Answer(texts, drafted if isinstance(drafted, int) else None)

    def _first_model(self) -> str:
        data = self._json("GET", "/v1/models").get("data")
        if not isinstance(data, list) or not data or not isinstance(data[0], dict) or "id" not in data[0]:
            raise AuditError(f"{self.url} lists no model. Name the one to audit as MODEL.")
        return str(data[0]["id"])

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, self.url + path, json=body)
            value = response.json()
        except (self._error, ValueError) as error:
            raise AuditError(
                f"{self.url}{path} gave no JSON answer ({type(error).__name__}). Check the address, and that the "
                "server runs."
            ) from None
        if response.status_code != 200:
            told = value.get("error") if isinstance(value, dict) else None
            param = told.get("param") if isinstance(told, dict) else None
            about = f" and names the field {param!r}" if param else ""
            raise AuditError(
                f"{self.url}{path} refuses a request with status {response.status_code}{about}. If it does not know "
                "the switch `speculative`, give two servers: --url SPECULATIVE --url PLAIN."
            )
        if not isinstance(value, dict):
            raise AuditError(f"{self.url}{path} answered with something else than an object.")
        return value


def draft_counter(metrics: str) -> float | None:
    """The sum of the counters of draft tokens in a text of Prometheus'; None where there is none."""
    found = None
    for name, value in _COUNTER.findall(metrics):
        if "spec" in name and name.removesuffix("_total").endswith("num_draft_tokens"):
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number):
                found = (found or 0.0) + number
    return found
