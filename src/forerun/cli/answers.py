"""The answers of `forerun generate` and `chat`: collected from a stream, as JSON, and as a line of statistics."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forerun.config import SamplingParams

if TYPE_CHECKING:
    from forerun.engine import LLM, SequenceStats, StreamChunk


@dataclass
class StreamedChoice:
    """One choice, with the tokens received so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    stats: SequenceStats | None = None
    num_forwards: int = 0
    num_accepted: int = 0

    @property
    def warnings(self) -> list[str]:
        return [] if self.stats is None else self.stats.warnings

    def add(self, chunk: StreamChunk) -> None:
        """Append the tokens and text of one step."""
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
        first: until the first tokens; None if there were none.
        num_first: tokens of the first chunk.
    """

    total: float = 0.0
    first: float | None = None
    num_first: int = 0

    def decoding_speed(self, num_tokens: int) -> float | None:
        """Return tokens per second after the first chunk; None if there are none."""
        if self.first is None or num_tokens <= self.num_first or self.total <= self.first:
            return None
        return (num_tokens - self.num_first) / (self.total - self.first)


def answers_object(outputs: Mapping[int, StreamedChoice], times: CallTimes) -> dict[str, Any]:
    """Return the part of --json that describes the answers. The finish reason after Ctrl-C is "abort"."""
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


def _stats_object(output: StreamedChoice) -> dict[str, Any] | None:
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
        "num_experts": stats.num_experts,
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
        "warnings": stats.warnings,
    }


def summary(outputs: Mapping[int, StreamedChoice], times: CallTimes, drafter: str | None, interrupted: bool) -> str:
    """Return the line of statistics, as several lines on a narrow terminal."""
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
    parts += acceptance_text(tokens, forwards, drafted if is_known else 0, accepted)
    if (
        not is_known and drafter is not None and tokens
    ):  # the number of draft tokens is known at the end of a choice only
        parts.append(f"{accepted} of the tokens were drafted")
    parts.append(drafter or "no drafter")
    reasons = {output.finish_reason or "abort" for output in outputs.values()}
    parts.append("interrupted" if interrupted else "finished: " + ", ".join(sorted(reasons)))
    return stderr_lines(parts)


def acceptance_text(num_tokens: int, num_forwards: int, num_drafted: int, num_accepted: int) -> list[str]:
    """Return tokens per target forward, and the share of draft tokens that were accepted, in words."""
    parts = [f"{num_tokens / num_forwards:.2f} tokens per forward"] if num_forwards else []
    if num_drafted:
        parts.append(f"{100 * num_accepted / num_drafted:.0f} % of {num_drafted} draft tokens accepted")
    return parts


def stderr_lines(parts: Iterable[str]) -> str:
    """Join the parts by dots, in lines no wider than the terminal if standard error is one."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else sys.maxsize
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if lines[-1] and len(longer) > width:
            lines.append(f"  {part}")
        else:
            lines[-1] = longer
    return "\n".join(lines)


def _num_tokens(outputs: Mapping[int, StreamedChoice]) -> int:
    return sum(len(output.token_ids) for output in outputs.values())


def follow(
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    show: Callable[[StreamChunk], None],
    template: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[dict[int, StreamedChoice], CallTimes, bool]:
    """Stream one request. Returns the choices by index, the wall-clock seconds, and whether Ctrl-C ended it.

    template: what a chat template is given beside the messages.

    Every chunk that is counted has been shown: Ctrl-C is held back until the end of a chunk.
    """
    from forerun.engine.engine import HeldInterrupts  # with torch, which --help does not load

    outputs: dict[int, StreamedChoice] = {index: StreamedChoice() for index in range(params.n)}
    interrupted = False
    times = CallTimes()
    start = time.perf_counter()
    try:
        given = {"chat_template_kwargs": template} if template else {}
        stream: Any = llm.stream(prompt, params, **given)
        with closing(stream):  # however it ends, the engine frees the sequence now
            for chunk in stream:
                with HeldInterrupts():
                    if times.first is None and chunk.token_ids:
                        times.first = time.perf_counter() - start
                        times.num_first = len(chunk.token_ids)
                    outputs[chunk.index].add(chunk)
                    show(chunk)
    except KeyboardInterrupt:
        interrupted = True
    times.total = time.perf_counter() - start
    return outputs, times, interrupted
