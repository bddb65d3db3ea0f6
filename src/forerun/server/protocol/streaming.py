"""Answers of chats and completions, whole or as chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from forerun.engine.results import Choice, Generation, StepOutput, StreamChunk
from forerun.engine.stats import SequenceStats
from forerun.engine.text import Detokenizer
from forerun.server.protocol.requests import CHAT_URL, CompletionRequest
from forerun.server.protocol.responses import ModelTexts, Offsets, chat_logprobs, completion_logprobs, usage
from forerun.server.protocol.speculation import speculation_metrics
from forerun.server.protocol.tools import CallDelta, Delta, ResponseParser, response_parser
from forerun.utils.vocabulary import encode_text


@dataclass(slots=True)
class Message:
    """A message as far as it has been parsed.

    Attributes:
        calls: name and arguments, a JSON text, of each call.
    """

    parser: ResponseParser
    one_call: bool = False
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, request: CompletionRequest) -> Message:
        """Begin a message of an answer."""
        return cls(response_parser(request.tools), request.one_call)

    def push(self, text: str, *, last: bool) -> Delta:
        """Add text, and return what it adds to the message. last: nothing follows."""
        delta = self.parser.push(text, last=last)
        if self.one_call:
            delta.calls = [call for call in delta.calls if call.index == 0]
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append((call.name or "", ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = name, arguments + call.arguments
        return delta

    def reasoning_tokens(self, tokenizer: Any) -> int:
        """Return the tokens of its reasoning."""
        return len(encode_text(tokenizer, self.reasoning, special=False)) if self.reasoning else 0


class Chunks:
    """Makes the body or the chunks of one answer.

    Args:
        texts: of the target.
        prompts: token ids of each of the request's prompts.
        model: the name of the model.
        name: unique among answers.
        created: Unix time in seconds.

    Attributes:
        num_events: 0, since chunks have no numbers.
    """

    ends_with_done = True
    num_events = 0

    def __init__(
        self,
        texts: ModelTexts,
        request: CompletionRequest,
        prompts: Seq[Seq[int]],
        *,
        model: str,
        name: str,
        created: int,
    ) -> None:
        self._texts, self._request, self._prompts, self._name = texts, request, prompts, name
        self._chat = request.url == CHAT_URL
        kind = "chat.completion" if self._chat else "text_completion"
        self._whole = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{name}",
            "object": kind,
            "created": created,
            "model": model,
        }
        self._head = self._whole | {"object": f"{kind}.chunk" if self._chat else kind}
        self._offsets: dict[int, Offsets] = {}  # of the choices that have begun
        self._detokenizers: dict[int, Detokenizer] = {}
        self._messages: dict[int, Message] = {}
        self._stats: list[SequenceStats] = []  # of those that have ended

    def whole(self, generations: Seq[Generation], *, details: bool = True) -> dict[str, Any]:
        """Return the body of the answer.

        Args:
            generations: of each of the request's prompts.
            details: include what depends on other requests and on speculation.
        """
        choices = []
        for prompt, generation in enumerate(generations):
            for choice in generation.choices:
                index = prompt * self._request.params.n + choice.index
                made = self._message(index, choice) if self._chat else self._text(prompt, generation, choice)
                choices.append({"index": index, "finish_reason": choice.finish_reason, **made})
        self._stats = [choice.stats for generation in generations for choice in generation.choices]
        body = {**self._whole, "choices": choices, "usage": self._usage(generations, details)}
        return body | (self._metrics() if details else {})

    def _usage(self, generations: Seq[Generation], details: bool) -> dict[str, Any]:
        reasoning = sum(each.reasoning_tokens(self._texts.tokenizer) for each in self._messages.values())
        return usage(self._request, generations, details=details, reasoning_tokens=reasoning)

    def _message(self, index: int, choice: Choice) -> dict[str, Any]:
        parsed = self._messages[index] = Message.of(self._request)
        parsed.push(choice.text, last=True)
        content = parsed.content.strip() if parsed.calls else parsed.content
        content_or_none = content if content or not parsed.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content_or_none, "refusal": None}
        if parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.calls:
            calls = [CallDelta(place, *call) for place, call in enumerate(parsed.calls)]
            message["tool_calls"] = [self._call(index, call, whole=True) for call in calls]
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs, self._texts.names)
        return {"message": message, "logprobs": logprobs, "finish_reason": _reason(choice.finish_reason, parsed)}

    def _call(self, index: int, call: CallDelta, *, whole: bool = False) -> dict[str, Any]:
        """Return a call, or the piece of one; a chunk's has its index."""
        place = {} if whole else {"index": call.index}
        if call.name is None:
            return {**place, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {**place, "id": f"call_{self._name}_{index}_{call.index}", "type": "function", "function": function}

    def _text(self, prompt: int, generation: Generation, choice: Choice) -> dict[str, Any]:
        echoed = generation.prompt_token_ids if self._request.echo else []
        text = self._prompt_text(prompt) + choice.text if self._request.echo else choice.text
        if choice.logprobs is None:
            return {"text": text, "logprobs": None}
        token_ids = [*echoed, *choice.token_ids]
        entries = [*(generation.prompt_logprobs or [] if self._request.echo else []), *choice.logprobs]
        starts = self._new_offsets(prompt).push(token_ids)
        offsets = [min(at, len(text)) for at in starts]  # the text may end before the last tokens do
        return {"text": text, "logprobs": completion_logprobs(token_ids, entries, offsets, self._texts.names)}

    def _new_offsets(self, prompt: int) -> Offsets:
        return Offsets([] if self._request.echo else self._prompts[prompt], self._texts.texts)

    def _prompt_text(self, prompt: int) -> str:
        """Return the text of one of the prompts, as it is echoed."""
        given = self._request.prompts[prompt]
        return given if isinstance(given, str) else self._texts.text(self._prompts[prompt])

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
            yield {**self._head, "choices": [], "usage": self._usage(generations, details=True), **self._metrics()}

    def failure(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error. body: as `error_response` makes it."""
        return body

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": speculation_metrics(self._stats)}}

    def _made(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """Return the chunk of one step."""
        logprobs, reason = self._logprobs(index, chunk), chunk.finish_reason
        if not self._chat:
            return self._chunk(index, chunk.text, logprobs, reason)
        message = self._messages[index]
        delta = message.push(chunk.text, last=reason is not None)
        more: dict[str, Any] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.calls:
            more["tool_calls"] = [self._call(index, call) for call in delta.calls]
        return self._chunk(index, delta.content, logprobs, _reason(reason, message), **more)

    def _drafts(self, prompt: int, index: int, chunk: StreamChunk) -> list[list[str | None]]:
        """Return [text, drafter] of each token; None for the target's own tokens, "draft" for an unnamed drafter."""
        if self._texts.texts is None:
            return []
        if index not in self._detokenizers:
            self._detokenizers[index] = Detokenizer(self._texts.texts, self._prompts[prompt])
        sources = chunk.sources or ("draft",) * chunk.num_accepted_draft
        drafters = [*sources, *[None] * (len(chunk.token_ids) - len(sources))]
        texts = [self._detokenizers[index].push((token_id,)) for token_id in chunk.token_ids]
        if texts and chunk.finish_reason is not None:
            texts[-1] += self._detokenizers[index].flush()
        return [[text, drafter] for text, drafter in zip(texts, drafters, strict=True)]

    def _opening(self, prompt: int, index: int) -> Iterator[dict[str, Any]]:
        """Yield the beginning of a choice: the role, or the echoed prompt."""
        self._offsets[index] = self._new_offsets(prompt)
        if self._chat:
            self._messages[index] = Message.of(self._request)
            yield self._chunk(index, "", None, None, role="assistant")
        elif self._request.echo:
            yield self._chunk(index, self._prompt_text(prompt), None, None)

    def _logprobs(self, index: int, chunk: StreamChunk) -> dict[str, Any] | None:
        if chunk.logprobs is None:
            return None
        if self._chat:
            return chat_logprobs(chunk.logprobs, self._texts.names)
        offsets = self._offsets[index].push(chunk.token_ids)
        return completion_logprobs(chunk.token_ids, chunk.logprobs, offsets, self._texts.names)

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None, **delta: Any
    ) -> dict[str, Any]:
        content = {"delta": {**delta, "content": text}} if self._chat else {"text": text}
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}


def _reason(reason: str | None, message: Message) -> str | None:
    return "tool_calls" if reason == "stop" and message.calls else reason
