"""A server of the bundled model whose answers are short, for tools that send it thousands of requests.

PYTHONPATH=src python tests/capped_server.py PORT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import replace

from starlette.requests import Request

from forerun.server.logs import log_as_json
from forerun.server.options import ServerOptions
from forerun.server.protocol.requests import CompletionRequest
from forerun.server.run import bound_socket, serve
from forerun.server.service import EngineRequest, Service
from mixed_requests import DRAFTERS, load

MOST = 8
"""Tokens of an answer."""


class Capped(Service):
    """Cuts every answer."""

    def submit_request(self, asked: CompletionRequest, prompts: Seq[list[int]], request: Request) -> EngineRequest:
        given = asked.params
        params = replace(
            given, max_tokens=min(given.max_tokens, MOST), min_tokens=min(given.min_tokens, MOST, given.max_tokens)
        )
        return super().submit_request(replace(asked, params=params), prompts, request)


if __name__ == "__main__":
    options = ServerOptions(port=int(sys.argv[1]))
    with bound_socket(options) as listening:
        log_as_json()
        serve(Capped(load(drafter=[*DRAFTERS, "prediction"]), "bundled", options), listening)
