"""A running peer: what it says of itself, and its answers, checked."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.bench.peers.pipe import Worker
from forerun.bench.peers.specs import LLAMA, PeerSpec
from forerun.files.json_file import Fields

_AVX512 = re.compile(r"AVX-?512", re.IGNORECASE)
_LISTED = re.compile(r"SSE|AVX|DEFAULT", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a peer may take.

    Attributes:
        load: until it has loaded its model.
        prompt: for one generation.
    """

    load: float
    prompt: float


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
    def start(cls, command: Sequence[str], options: Mapping[str, Any], limits: Limits, log: Path | None) -> Peer:
        """Start a worker and wait until it has loaded.

        Args:
            options: its first line; "threads", "name" and "kind" are among them.

        Raises:
            PeerError: it is not ready in time, or says nothing that can be read.
        """
        worker = Worker(command, options["threads"], log)
        try:
            said = worker.ask(options, limits.load, tell_errors=True).fields("ready")
            precision = said.string("precision")
            name = options["name"] or f"{options['kind']} {precision}"
            version, instructions = said.string("version"), said.string("instructions")
            return cls(name, worker, version, instructions, precision, said.list_of("methods", str), said)
        except BaseException:
            worker.stop(at_once=True)
            raise

    def generate(self, method: str, token_ids: Sequence[int], max_tokens: int, limit: float) -> Answer | None:
        """One generation; None where the method failed, which is not asked again then.

        Raises:
            PeerError: the peer itself cannot go on.
        """
        request = {"method": method, "token_ids": list(token_ids), "max_tokens": max_tokens}
        reply = self.worker.ask(request, limit)
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

    def lacks_avx512(self, processor_has_it: bool) -> bool:
        """Whether the peer lists its instruction sets, and AVX-512 is not among them though the processor has it."""
        listed = _LISTED.search(self.instructions) is not None
        return processor_has_it and listed and _AVX512.search(self.instructions) is None

    def _refuse(self, method: str, reason: str) -> None:
        self.methods.remove(method)
        self.refused[method] = reason


def command_of(spec: PeerSpec) -> list[str]:
    """What starts the worker of a peer."""
    if spec.kind == LLAMA:
        return [sys.executable, "-m", "forerun.bench.peers.llama_worker"]
    return [spec.program, str(Path(__file__).with_name("worker.py"))]


def own_command() -> list[str]:
    """What starts forerun's worker."""
    return [sys.executable, "-m", "forerun.bench.peers.forerun_worker"]


def options_of(spec: PeerSpec, model: str, dtype: str, threads: int) -> dict[str, Any]:
    """The first line for a peer's worker. model: forerun's target, for a peer that was given none."""
    return {
        "kind": spec.kind,
        "name": spec.name,
        "program": spec.program,
        "model": spec.model or model,
        "draft": spec.draft,
        "dtype": dtype,
        "threads": threads,
        "lookup": spec.lookup if spec.kind == LLAMA else int(spec.lookup),
    }
