"""The progress of a stream, with which another server can go on where one has ended."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from zlib import crc32

from forerun.engine.results import StepOutput, StreamChunk
from forerun.errors import ReplicaError

_OTHER_TOKENS = (
    "The replica that computed the stream has ended, and another one has come to other tokens: without a seed they "
    "are drawn anew. Send the request again, with a seed if its streams are to go on."
)


class Sent(NamedTuple):
    """What has been sent of one choice.

    Attributes:
        checksum: of its tokens.
        ended: its finish reason was among it.
    """

    num_tokens: int = 0
    num_characters: int = 0
    checksum: int = 0
    ended: bool = False

    def after(self, chunk: StreamChunk) -> Sent:
        """Return what has been sent when this chunk has been, too."""
        return Sent(
            self.num_tokens + len(chunk.token_ids),
            self.num_characters + len(chunk.text),
            crc32(array("q", chunk.token_ids), self.checksum),
            chunk.finish_reason is not None,
        )


@dataclass(slots=True)
class StreamState:
    """An answer that may pass from server to server.

    Attributes:
        name, created: of the answer.
        num_events: numbered events that have been sent.
        choices: index of a choice -> what has been sent of it.
    """

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    num_events: int = 0
    choices: dict[int, Sent] = field(default_factory=dict)

    def advance(self, choice: int, sent: Sent, num_events: int) -> None:
        """Record what has been sent of a choice, and of all events."""
        self.choices[choice] = sent
        self.num_events = num_events


class Replay:
    """Divides the outputs of a request that is computed again into what has been sent and what is new.

    Args:
        before: index of a choice -> what has been sent of it.
        repeatable: the request is greedy or has a seed.

    Attributes:
        now: index of a choice -> all of its outputs so far.
    """

    def __init__(self, before: Mapping[int, Sent], repeatable: bool) -> None:
        self._before = {**before}
        self._repeatable = repeatable
        self.now: dict[int, Sent] = {}

    def divided(self, index: int, output: StepOutput) -> Iterator[tuple[StepOutput, bool]]:
        """Yield the parts of an output of a choice, and of each whether it is new.

        Raises:
            ReplicaError: other tokens have been sent.
        """
        now = self.now.get(index, Sent())
        before = self._before.get(index)
        after = self.now[index] = now.after(output.chunk)
        if before is None:
            yield output, True
        elif before.num_tokens and not self._repeatable:
            raise ReplicaError(_OTHER_TOKENS)
        elif before.ended or after.num_tokens < before.num_tokens:
            if after.ended and after != before:
                raise ReplicaError(_OTHER_TOKENS)
            yield output, False
        else:
            sent, new = _divide(output, before.num_tokens - now.num_tokens, before.num_characters - now.num_characters)
            if now.after(sent.chunk) != before:
                raise ReplicaError(_OTHER_TOKENS)
            del self._before[index]
            yield sent, False
            yield new, True


def _divide(output: StepOutput, tokens: int, characters: int) -> tuple[StepOutput, StepOutput]:
    """Divide an output after so many tokens, whose text has so many characters."""
    chunk = output.chunk

    def part(which: slice, text: str, accepted: int) -> StreamChunk:
        logprobs = None if chunk.logprobs is None else chunk.logprobs[which]
        ids = chunk.token_ids[which]
        sources = chunk.sources[which]
        return replace(chunk, text=text, token_ids=ids, logprobs=logprobs, sources=sources, num_accepted_draft=accepted)

    first = part(slice(tokens), chunk.text[:characters], min(chunk.num_accepted_draft, tokens))
    rest = part(slice(tokens, None), chunk.text[characters:], max(chunk.num_accepted_draft - tokens, 0))
    sent = replace(first, finish_reason=None, stats=None)
    return replace(output, chunk=sent, choice=None, prompt_logprobs=None), replace(output, chunk=rest)
