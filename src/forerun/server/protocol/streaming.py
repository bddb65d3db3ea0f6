"""Answers as chunks of a stream, by the outputs of the engine's steps."""

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
    """Makes what one answer consists of: the whole, or chunks.

    Args:
        responses: of the target.
        prompts: token ids of each of the request's prompts.
        model, name, created: as `Responses.body`.
    """

    ends_with_done = True

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
        """The body of the answer."""
        return self._responses.body(self._request, generations, **self._named)

    def of(self, place: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """The chunks of one output; none where there is nothing to show yet.

        place: of the prompt that it answers.
        """
        chunk = output.chunk
        index = place * self._request.params.n + chunk.index
        if index not in self._offsets:
            yield from self._opening(place, index)
        drafts = self._request.include_drafts and chunk.token_ids
        if not (chunk.text or chunk.finish_reason is not None or chunk.logprobs or drafts):
            return
        made = self._made(index, chunk)
        if self._request.include_drafts:
            made["choices"][0]["drafts"] = self._drafts(place, index, chunk)
        if output.choice is not None:
            self._stats.append(output.choice.stats)
            last = len(self._stats) == len(self._prompts) * self._request.params.n
            if last and not self._request.include_usage:  # clients look for a choice in every chunk but the usage's
                made |= self._metrics()
        yield made

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """For a request that wants to know the usage, a last chunk; it has no choices."""
        if self._request.include_usage:
            told = usage(self._request, generations, details=True)
            yield {**self._head, "choices": [], "usage": told, **self._metrics()}

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """What ends a stream with an error. body: as `error_response` makes it."""
        return body

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": speculation_metrics(self._stats)}}

    def _made(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """The chunk of what a step has added; of a text that may hold calls, its content and its calls."""
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

    def _drafts(self, place: int, index: int, chunk: StreamChunk) -> list[list[str | None]]:
        """[text, drafter] of each token; no drafter where the model gave it itself, "draft" for one without a name."""
        if self._responses.texts is None:
            return []
        if index not in self._texts:
            self._texts[index] = Detokenizer(self._responses.texts, self._prompts[place])
        sources = chunk.sources or ("draft",) * chunk.num_accepted_draft
        drafters = [*sources, *[None] * (len(chunk.token_ids) - len(sources))]
        texts = [self._texts[index].push((token_id,)) for token_id in chunk.token_ids]
        if texts and chunk.finish_reason is not None:
            texts[-1] += self._texts[index].flush()
        return [[text, drafter] for text, drafter in zip(texts, drafters, strict=True)]

    def _opening(self, place: int, index: int) -> Iterator[dict[str, Any]]:
        """What a choice begins with: the role, or the prompt where it is echoed."""
        prompt = self._prompts[place]
        offsets = self._offsets[index] = Offsets([] if self._request.echo else prompt, self._responses.texts)
        if self._chat:
            yield self._chunk(index, "", None, None, role="assistant")
        elif self._request.echo:
            offsets.push(prompt)
            yield self._chunk(index, self._responses.prompt_text(self._request, place, prompt), None, None)

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
        said = {"delta": {**delta, "content": text}} if self._chat else {"text": text}
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}
