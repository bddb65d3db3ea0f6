"""Answers of chats and completions, whole or as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from typing import Any

from forerun.engine.results import Generation, StepOutput, StreamChunk
from forerun.engine.stats import SequenceStats
from forerun.engine.text import Detokenizer
from forerun.server.protocol.requests import CHAT_URL, CompletionRequest
from forerun.server.protocol.responses import Offsets, Responses, chat_logprobs, completion_logprobs, usage
from forerun.server.protocol.speculation import speculation_metrics
from forerun.server.protocol.tools import CallReader, numbered


class Chunks:
    """Makes the body or the chunks of one answer.

    Args:
        responses: of the target.
        prompts: token ids of each of the request's prompts.
        model, name, created: as `Responses.body`.

    Attributes:
        num_events: 0, since chunks have no numbers.
    """

    ends_with_done = True
    num_events = 0

    def __init__(
        self,
        responses: Responses,
        request: CompletionRequest,
        prompts: Seq[list[int]],
        *,
        model: str,
        name: str,
        created: int,
    ) -> None:
        self._responses, self._request, self._prompts = responses, request, prompts
        self._named: dict[str, Any] = {"model": model, "name": name, "created": created}
        self._chat = request.url == CHAT_URL
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{name}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": created,
            "model": model,
        }
        self._offsets: dict[int, Offsets] = {}  # of the choices that have begun
        self._texts: dict[int, Detokenizer] = {}
        self._calls: dict[int, CallReader] = {}
        self._stats: list[SequenceStats] = []  # of those that have ended

    def whole(self, generations: Seq[Generation]) -> dict[str, Any]:
        """Return the body of the answer."""
        return self._responses.body(self._request, generations, **self._named)

    def of(self, prompt: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one output; none if there is nothing to show yet.

        Args:
            prompt: index of the prompt that it answers.
        """
        chunk = output.chunk
        index = prompt * self._request.params.n + chunk.index
        if index not in self._offsets:
            yield from self._opening(prompt, index)
        drafts = self._request.include_drafts and chunk.token_ids
        if not (chunk.text or chunk.finish_reason is not None or chunk.logprobs or drafts):
            return
        made = self._made(index, chunk)
        if self._request.include_drafts:
            made["choices"][0]["drafts"] = self._drafts(prompt, index, chunk)
        if output.choice is not None:
            self._stats.append(output.choice.stats)
            last = len(self._stats) == len(self._prompts) * self._request.params.n
            if last and not self._request.include_usage:  # clients look for a choice in every chunk but the usage's
                made |= self._metrics()
        yield made

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield a last chunk, without choices, if the request includes the usage."""
        if self._request.include_usage:
            total = usage(self._request, generations, details=True)
            yield {**self._head, "choices": [], "usage": total, **self._metrics()}

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error. body: as `error_response` makes it."""
        return body

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": speculation_metrics(self._stats)}}

    def _made(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """Return the chunk of one step; of a text that may contain tool calls, its content and calls."""
        logprobs = self._logprobs(index, chunk)
        if not self._request.tools:
            return self._chunk(index, chunk.text, logprobs, chunk.finish_reason)
        reader = self._calls.setdefault(index, CallReader(f"{self._named['name']}_{index}"))
        content, calls = reader.push(chunk.text, last=chunk.finish_reason is not None)
        reason: str | None = chunk.finish_reason
        if reason == "stop" and reader.num_calls:
            reason = "tool_calls"
        more = {"tool_calls": numbered(calls, reader.num_calls - len(calls))} if calls else {}
        return self._chunk(index, content, logprobs, reason, **more)

    def _drafts(self, prompt: int, index: int, chunk: StreamChunk) -> list[list[str | None]]:
        """Return [text, drafter] of each token; None for the target's own tokens, "draft" for an unnamed drafter."""
        if self._responses.texts is None:
            return []
        if index not in self._texts:
            self._texts[index] = Detokenizer(self._responses.texts, self._prompts[prompt])
        sources = chunk.sources or ("draft",) * chunk.num_accepted_draft
        drafters = [*sources, *[None] * (len(chunk.token_ids) - len(sources))]
        texts = [self._texts[index].push((token_id,)) for token_id in chunk.token_ids]
        if texts and chunk.finish_reason is not None:
            texts[-1] += self._texts[index].flush()
        return [[text, drafter] for text, drafter in zip(texts, drafters, strict=True)]

    def _opening(self, prompt: int, index: int) -> Iterator[dict[str, Any]]:
        """Yield the beginning of a choice: the role, or the echoed prompt."""
        token_ids = self._prompts[prompt]
        self._offsets[index] = Offsets([] if self._request.echo else token_ids, self._responses.texts)
        if self._chat:
            yield self._chunk(index, "", None, None, role="assistant")
        elif self._request.echo:
            yield self._chunk(index, self._responses.prompt_text(self._request, prompt, token_ids), None, None)

    def _logprobs(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        if chunk.logprobs is None:
            return None
        names = self._responses.names
        if self._chat:
            return chat_logprobs(chunk.logprobs, names)
        offsets = self._offsets[index].push(chunk.token_ids)
        return completion_logprobs(chunk.token_ids, chunk.logprobs, offsets, names)

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, **delta: Any
    ) -> dict[str, Any]:
        content = {"delta": {**delta, "content": text}} if self._chat else {"text": text}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}
