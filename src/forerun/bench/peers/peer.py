"""A running peer: what it says of itself, and its answers, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.peers.pipe import Worker
from forerun.files.json_file import Fields

_AVX512 = re.compile(r"AVX-?512", re.IGNORECASE)
_LISTED = re.compile(r"SSE|AVX|DEFAULT", re.IGNORECASE)


LOAD_LIMIT, PROMPT_LIMIT = 600.0, 300.0
"""Seconds in which a peer must have loaded its model, and have answered a prompt."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a peer is started.

    Attributes:
        text: what the user named it by.
        command: starts its worker.
        options: the worker's first line; "threads", "name" and "kind" are among them.
    """

    text: str
    command: Sequence[str]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """One generation.

    Attributes:
        token_ids: what was generated.
        seconds: around the generation, prompt included.
        first_seconds: of these, until the first token; None if the peer does not tell.
        steps: forwards that gave tokens; None if the peer does not tell.
    """

    token_ids: Sequence[int]
    seconds: float
    first_seconds: float | None
    steps: int | None

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / len(self.token_ids)


@dataclass(slots=True)
class Peer:
    """An engine in a process of its own.

    Attributes:
        name: what its rows are called.
        worker: its process.
        version: of its software.
        instructions: the instruction sets that it says it uses.
        precision: of its weights, as it calls it.
        methods: what it can do, plain decoding first.
        about: all that it said when it was ready.
        refused: method -> why it was left out.
    """

    name: str
    worker: Worker
    version: str
    instructions: str
    precision: str
    methods: list[str]
    about: Fields
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def bits(self) -> int | None:
        """The class of its precision: 16 of bfloat16, 8 of Q8_0, 4 of Q4_K; None where its name has no number."""
        found = re.search(r"\d+", self.precision)
        return int(found.group()) if found else None

    @classmethod
    def start(cls, start: Start) -> Peer:
        """Start a worker and wait until it has loaded.

        Raises:
            PeerError: it is not ready in time, or says nothing that can be read.
        """
        options, worker = start.options, Worker(start.command, start.options["threads"])
        try:
            said = worker.ask(options, LOAD_LIMIT, tell_errors=True).fields("ready")
            precision = said.string("precision")
            name = options["name"] or f"{options['kind']} {precision}"
            version, instructions = said.string("version"), said.string("instructions")
            return cls(name, worker, version, instructions, precision, said.list_of("methods", str), said)
        except BaseException:
            worker.stop(at_once=True)
            raise

    def generate(self, method: str, token_ids: Sequence[int], max_tokens: int) -> Answer | None:
        """One generation; None where the method failed, which is not asked again then.

        Raises:
            PeerError: the peer itself cannot go on.
        """
        request = {"method": method, "token_ids": list(token_ids), "max_tokens": max_tokens}
        reply = self.worker.ask(request, PROMPT_LIMIT)
        if "error" in reply:
            self._refuse(method, f"it reported {reply.string('error')}")
            return None
        answer = Answer(
            reply.list_of("token_ids", int),
            reply.number("seconds", low=0),
            reply.number("first_seconds", None, low=0),
            reply.integer("steps", None, low=1),
        )
        if len(answer.token_ids) < max_tokens or math.isclose(answer.seconds, 0):
            self._refuse(method, f"it gave {len(answer.token_ids)} tokens in place of {max_tokens}")
            return None
        return answer

    def instruction_text(self, processor_has_avx512: bool) -> str:
        """The instruction sets; where it lists them and AVX-512, which the processor has, is not among them: that."""
        lacks = processor_has_avx512 and _LISTED.search(self.instructions) and not _AVX512.search(self.instructions)
        return self.instructions + ("; without AVX-512, which the processor has" if lacks else "")

    def _refuse(self, method: str, reason: str) -> None:
        self.methods.remove(method)
        self.refused[method] = reason
