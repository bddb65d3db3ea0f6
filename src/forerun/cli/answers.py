"""What `forerun generate` prints of the answers: an object for programs, a line of statistics for people."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forerun.config import SamplingParams

if TYPE_CHECKING:
    from forerun.engine import LLM, SequenceStats, StreamChunk


@dataclass
class Output:
    """One choice, as far as it has come."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    stats: SequenceStats | None = None
    num_forwards: int = 0
    num_accepted: int = 0

    def add(self, chunk: StreamChunk) -> None:
        """What one step gave."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.num_forwards += bool(chunk.token_ids)
        self.num_accepted += chunk.num_accepted_draft
        self.finish_reason = chunk.finish_reason or self.finish_reason
        self.stats = chunk.stats or self.stats
        self.logprobs += chunk.logprobs or []


@dataclass
class CallTimes:
    """Wall-clock seconds of a call.

    Attributes:
        total: from the call to the last token, the prompt's time included.
        first: until the first tokens came; None if none did.
        num_first: tokens that came with the first.
    """

    total: float = 0.0
    first: float | None = None
    num_first: int = 0

    def decoding_speed(self, num_tokens: int) -> float | None:
        """Tokens per second after the first; None if there are none."""
        if self.first is None or num_tokens <= self.num_first or self.total <= self.first:
            return None
        return (num_tokens - self.num_first) / (self.total - self.first)


def as_object(outputs: Mapping[int, Output], times: CallTimes) -> dict[str, Any]:
    """What --json prints, beside the facts of the call. A choice cut short by Ctrl-C has the reason "abort"."""
    choices = [
        {
            "index": index,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason or "abort",
            **({"logprobs": output.logprobs} if output.logprobs else {}),
            "stats": _stats_object(output),
        }
        for index, output in outputs.items()
    ]
    tokens = _num_tokens(outputs)
    return {
        "choices": choices,
        "num_tokens": tokens,
        "seconds": times.total,
        "time_first_token": times.first,
        "tokens_per_second": tokens / times.total,
        "decoding_tokens_per_second": times.decoding_speed(tokens),
    }


def _stats_object(output: Output) -> dict[str, Any] | None:
    stats = output.stats
    if stats is None:
        return None
    sources = {
        name: {"num_draft_tokens": each.num_draft_tokens, "num_accepted_tokens": each.num_accepted_tokens}
        for name, each in stats.sources.items()
    }
    return {
        "num_tokens": stats.num_tokens,
        "num_forwards": stats.num_forwards,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "num_plain_forwards": stats.num_plain_forwards,
        "speculation": stats.speculation,
        "decisions": stats.decisions,
        "num_cached_tokens": stats.num_cached_tokens,
        "mean_num_draft_tokens": stats.mean_num_draft_tokens,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate if stats.num_draft_tokens else None,
        "drafted_per_position": list(stats.drafted_per_position),
        "reached_per_position": list(stats.reached_per_position),
        "accepted_per_position": list(stats.accepted_per_position),
        "sources": sources,
        "tokens_per_second": stats.tokens_per_second,
        "time_draft": stats.time_draft,
        "time_target": stats.time_target,
        "time_verify": stats.time_verify,
        "time_first_token": stats.time_first_token,
        "time_total": stats.time_total,
    }


def summary(outputs: Mapping[int, Output], times: CallTimes, drafter: str | None, interrupted: bool) -> str:
    """The line of statistics, in several on a terminal that is narrower."""
    tokens = _num_tokens(outputs)
    parts = [f"forerun: {tokens} tokens in {times.total:.2f} s"]
    if times.first is not None:
        parts.append(f"the first after {times.first:.2f} s")
    if (speed := times.decoding_speed(tokens)) is not None:
        parts.append(f"then {speed:.1f} tokens/s")
    forwards = sum(output.num_forwards for output in outputs.values())
    accepted = sum(output.num_accepted for output in outputs.values())
    measured = [output.stats for output in outputs.values() if output.stats is not None]
    drafted = sum(stats.num_draft_tokens for stats in measured)
    is_known = drafted and len(measured) == len(outputs)
    parts += cost(tokens, forwards, drafted if is_known else 0, accepted)
    if not is_known and drafter is not None and tokens:  # how many were drafted is told at the end of a choice only
        parts.append(f"{accepted} of the tokens were drafted")
    parts.append(drafter or "no drafter")
    reasons = {output.finish_reason or "abort" for output in outputs.values()}
    parts.append("interrupted" if interrupted else "finished: " + ", ".join(sorted(reasons)))
    return joined(parts, shutil.get_terminal_size().columns if sys.stderr.isatty() else None)


def cost(num_tokens: int, num_forwards: int, num_drafted: int, num_accepted: int) -> list[str]:
    """What tokens have cost the target, and what drafting was good for, in words."""
    parts = [f"{num_tokens / num_forwards:.2f} tokens per forward"] if num_forwards else []
    if num_drafted:
        parts.append(f"{100 * num_accepted / num_drafted:.0f} % of {num_drafted} draft tokens accepted")
    return parts


def joined(parts: Sequence[str], width: int | None) -> str:
    """The parts with dots between them, in lines of at most this width where there is one."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if width is not None and lines[-1] and len(longer) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _num_tokens(outputs: Mapping[int, Output]) -> int:
    return sum(len(output.token_ids) for output in outputs.values())


# One request as it streams: what came is counted and shown chunk by chunk, and Ctrl-C ends it between two chunks.


def follow(
    llm: LLM, prompt: Any, params: SamplingParams, show: Callable[[StreamChunk], None]
) -> tuple[dict[int, Output], CallTimes, bool]:
    """Generate; returns the choices by index, the wall-clock seconds, and whether Ctrl-C ended it.

    What is counted has been shown, also where Ctrl-C came between the two: it waits for the end of the chunk.
    """
    from forerun.engine.interrupts import HeldInterrupts  # with torch, which --help does not load

    outputs: dict[int, Output] = {index: Output() for index in range(params.n)}
    interrupted = False
    times, start = CallTimes(), time.perf_counter()
    try:
        stream: Any = llm.stream(prompt, params)
        with closing(stream):  # however it ends, the engine frees the sequence now
            for chunk in stream:
                with HeldInterrupts():
                    if times.first is None and chunk.token_ids:
                        times.first, times.num_first = time.perf_counter() - start, len(chunk.token_ids)
                    outputs[chunk.index].add(chunk)
                    show(chunk)
    except KeyboardInterrupt:
        interrupted = True
    times.total = time.perf_counter() - start
    return outputs, times, interrupted
