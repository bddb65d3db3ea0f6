"""A server of the bundled model whose answers are short, for tools that send it thousands of requests.

PYTHONPATH=src python tests/capped_server.py PORT
"""

from __future__ import annotations

import sys
from dataclasses import replace

from forerun.engine.sequence import Request
from forerun.server.logs import start_log
from forerun.server.options import ServerOptions
from forerun.server.protocol.requests import CompletionRequest
from forerun.server.run import bound_socket, run_server
from forerun.server.service import Service
from mixed_requests import DRAFTERS, load

MOST = 8
"""Tokens of an answer."""


class Capped(Service):
    """Cuts every answer."""

    def requests(self, asked: CompletionRequest, tenant: str | None) -> list[Request]:
        given = asked.params
        params = replace(
            given, max_tokens=min(given.max_tokens, MOST), min_tokens=min(given.min_tokens, MOST, given.max_tokens)
        )
        return super().requests(replace(asked, params=params), tenant)


if __name__ == "__main__":
    options = ServerOptions(port=int(sys.argv[1]))
    with bound_socket(options) as listening:
        start_log(options.log_format)
        run_server(Capped(load(drafter=[*DRAFTERS, "prediction"]), "bundled", options), listening)
