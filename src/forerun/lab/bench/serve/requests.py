"""The requests of a load, and each one's answer as its client saw it: when which part came, and how it ended."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from forerun.lab.results.files import without_folders
from forerun.lab.results.schema import PromptFacts
from forerun.server.protocol.requests import CHAT_URL, COMPLETIONS_URL
from forerun.utils.files import digest
from forerun.utils.workloads import Case

ANSWER_SHARES = (0.5, 1.0, 0.25, 0.75, 1.0)
"""Lengths of answers as shares of the longest, one request after the other."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request.

    Attributes:
        prompt: the number of its prompt among those of the load.
        path: where it is posted.
        body: without the model's name and fields of the server's own.
    """

    prompt: int
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a load, in the order in which they are sent.

    Attributes:
        workloads: the workload of each prompt.
        cases: the prompts.
    """

    workloads: Sequence[str]
    cases: Sequence[Case]

    @classmethod
    def of(cls, cases: Mapping[str, Sequence[Case]]) -> Prompts:
        """Take workloads by name; a prompt of each in turn."""
        longest = max(map(len, cases.values()))
        turns = [(name, each[i]) for i in range(longest) for name, each in cases.items() if i < len(each)]
        return cls([name for name, _ in turns], [case for _, case in turns])

    def requests(self, max_tokens: int, temperature: float, ignore_eos: bool) -> list[LoadRequest]:
        """Make a request for every prompt: a chat, its first turn only, to /v1/chat/completions; text to
        /v1/completions.

        Args:
            max_tokens: of the longest answer; the lengths of the others alternate below it.
            temperature: above 0 every request has a seed of its own.
        """
        made = []
        for number, case in enumerate(self.cases):
            opening = case.opening
            body: dict[str, Any] = {"prompt" if isinstance(opening, str) else "messages": opening}
            share = ANSWER_SHARES[number % len(ANSWER_SHARES)]
            body |= {"max_tokens": max(2, round(max_tokens * share)), "temperature": temperature}
            body |= {"seed": number + 1} if temperature else {}
            body |= {"ignore_eos": True} if ignore_eos else {}
            made.append(LoadRequest(number, COMPLETIONS_URL if isinstance(opening, str) else CHAT_URL, body))
        return made

    def facts(self, num_tokens: Mapping[int, int]) -> list[PromptFacts]:
        """Describe the prompts. num_tokens: by prompt, as a server counted them; 0 where none did."""
        return [
            PromptFacts(
                f"{case.name} ({number})",
                without_folders(workload),
                case.category,
                num_tokens.get(number, 0),
                digest(json.dumps(case.opening).encode())[:16],
            )
            for number, (workload, case) in enumerate(zip(self.workloads, self.cases, strict=True))
        ]


_DONE = b"[DONE]"
_DRAFTED = "num_draft_tokens"
_ACCEPTED = "num_accepted_draft_tokens"
_FORWARDS = "num_forwards"


@dataclass(slots=True)
class TimedRequest:
    """One request and its answer. Times are in seconds of one clock.

    Attributes:
        request: what was sent.
        sent: when it was sent.
        ended: when the answer was complete, or the request had failed.
        arrivals: when pieces of the answer's text came.
        text: of the answer.
        num_tokens: of the answer, as the server counts; pieces of text where it reports no count.
        is_counted: the server reported the count.
        prompt_tokens: as the server counts; None where it reports no count.
        num_drafted, num_accepted, num_forwards: as the server reports; 0 where it does not.
        error: why there is no whole answer; None if there is one.
    """

    request: LoadRequest
    sent: float
    ended: float = math.nan
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    num_tokens: int = 0
    is_counted: bool = False
    prompt_tokens: int | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    num_forwards: int = 0
    error: str | None = None

    @property
    def first_token(self) -> float | None:
        """Return the seconds from sending to the first piece of text; None where none came."""
        return self.arrivals[0] - self.sent if self.arrivals else None

    @property
    def seconds(self) -> float:
        """Return the seconds from sending to the end."""
        return self.ended - self.sent

    @property
    def per_token(self) -> float | None:
        """Return the seconds per token after the first; None where there is no second one."""
        if len(self.arrivals) < 2 or self.num_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_tokens - 1)

    @property
    def waits(self) -> list[float]:
        """Return the seconds between arrivals, however many tokens came with each."""
        return [now - before for before, now in pairwise(self.arrivals)]

    def read(self, events: Iterable[tuple[float, bytes]]) -> None:
        """Take the content of a stream of server-sent events. events: (arrival time, data)."""
        for when, data in events:
            if data == _DONE:
                continue
            try:
                body = json.loads(data)
            except ValueError:
                body = None
            if not isinstance(body, dict):
                self.error = "an event is no JSON object"
                return
            if body.get("error"):
                self.error = error_of(body)
                return
            self._take(when, body)
        if not self.is_counted:
            self.num_tokens = len(self.arrivals)

    def _take(self, when: float, body: Mapping[str, Any]) -> None:
        piece = "".join(_texts(body))
        if piece:
            self.arrivals.append(when)
            self.text += piece
        usage = body.get("usage")
        if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
            self.num_tokens = usage["completion_tokens"]
            self.is_counted = True
            self.prompt_tokens = usage.get("prompt_tokens")
        metrics = body.get("metrics")
        reported = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        if isinstance(reported, dict):
            self.num_drafted, self.num_accepted, self.num_forwards = (
                int(reported.get(name) or 0) for name in (_DRAFTED, _ACCEPTED, _FORWARDS)
            )


class EventReader:
    """Splits a stream of bytes into the data of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that are complete."""
        held = self._rest + piece
        if b"\r" in held:
            held = held.replace(b"\r\n", b"\n")
        *whole, self._rest = held.split(b"\n\n")
        lines = [[line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")] for event in whole]
        return [data for data in map(b"\n".join, lines) if data]


def error_of(body: object) -> str:
    """Return the reason in an error body of OpenAI's API, in one line."""
    reason = body.get("error", body.get("detail")) if isinstance(body, dict) else None
    message = reason.get("message", reason) if isinstance(reason, dict) else reason
    return " ".join(str(message).split())[:300] if message else "no reason is given"


def _texts(body: Mapping[str, Any]) -> Iterator[str]:
    for choice in body.get("choices") or ():
        delta = choice.get("delta")
        held = delta if isinstance(delta, dict) else choice
        for name in ("text", "content", "reasoning_content"):
            if isinstance(held.get(name), str):
                yield held[name]
