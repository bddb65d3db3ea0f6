"""Answers of chats and completions, whole or as chunks of a stream: texts, log-probabilities, usage and figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain, pairwise, zip_longest
from typing import Any

from forerun.chat.response_format import CALL, CONTENT, REASONING
from forerun.chat.response_parser import Delta, ResponseParser
from forerun.drafters.ngram.prediction import SOURCE
from forerun.engine.results import Choice, Generation, StepOutput, StreamChunk
from forerun.engine.stats import SequenceStats
from forerun.engine.text import Detokenizer, TokenTexts
from forerun.sampling import TokenLogprob
from forerun.server.protocol.model_texts import ModelTexts, TokenNames
from forerun.server.protocol.requests import CHAT_URL, CompletionRequest
from forerun.utils.vocabulary import encode_text

_LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have."""


def chat_logprobs(entries: Iterable[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice: a list of objects."""

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text(token_id), "logprob": max(logprob, _LOWEST), "bytes": list(names.data(token_id))}

    content = [
        {**named(entry.token_id, entry.logprob), "top_logprobs": [named(*other) for other in entry.top]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Seq[int], entries: Seq[TokenLogprob | None], offsets: Seq[int], names: TokenNames
) -> dict[str, Any]:
    """Return the `logprobs` of a completion's choice: four lists.

    Args:
        token_ids: [n] of the answer, after those of an echoed prompt.
        entries: [n] their log-probabilities; None for the prompt's first token.
        offsets: [n] start of each in the text.
    """
    return {
        "tokens": [names.text(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else max(entry.logprob, _LOWEST) for entry in entries],
        "top_logprobs": [None if entry is None else _top(entry, names) for entry in entries],
        "text_offset": list(offsets),
    }


class Offsets:
    """Starts of tokens in a growing text, in characters; a token within a character starts with it.

    Args:
        before: tokens before the text, on which decoding may depend.
        texts: None if the model has no tokenizer, and so no text.
    """

    def __init__(self, before: Seq[int], texts: TokenTexts | None) -> None:
        self._detokenizer = None if texts is None else Detokenizer(texts, before)
        self._at = 0

    def push(self, token_ids: Seq[int]) -> list[int]:
        """Return the starts of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._at)
            self._at += 0 if self._detokenizer is None else len(self._detokenizer.push((token_id,)))
        return offsets


def _top(entry: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """Return the most probable tokens and the chosen one; of several with the same name, the most probable."""
    found: dict[str, float] = {}
    for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(names.text(token_id), max(logprob, _LOWEST))
    return found


def usage(
    request: CompletionRequest, generations: Seq[Generation], *, details: bool, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """Count the tokens of prompts and answers. Choices of one prompt count it once.

    details: include what depends on other requests and on speculation: cached prompt tokens, and accepted tokens of a
        prediction.
    """
    every = list(chain.from_iterable(generation.choices for generation in generations))
    prompt_tokens = sum(len(generation.prompt_token_ids) for generation in generations)
    completion_tokens = sum(len(choice.token_ids) for choice in every)
    found: dict[str, Any] = _counts(prompt_tokens, completion_tokens)
    more: dict[str, int] = {"reasoning_tokens": reasoning_tokens} if reasoning_tokens else {}
    if details:
        cached = sum(generation.choices[0].stats.num_cached_tokens for generation in generations)
        found["prompt_tokens_details"] = {"cached_tokens": cached}
        if request.params.prediction is not None:
            predicted = [choice.stats.sources[SOURCE] for choice in every if SOURCE in choice.stats.sources]
            accepted = more["accepted_prediction_tokens"] = sum(each.num_accepted_tokens for each in predicted)
            more["rejected_prediction_tokens"] = sum(each.num_draft_tokens for each in predicted) - accepted
    return found | ({"completion_tokens_details": more} if more else {})


def _counts(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation_metrics(every: Iterable[SequenceStats]) -> dict[str, Any]:
    """Return the figures of all choices of a response together.

    `mean_acceptance_length` is tokens per speculative step, bonus token included. `acceptance_histogram` has at index i
    the speculative steps in which i draft tokens were accepted. `num_spec_tokens` is the deepest draft. `decisions` are
    counts of steps by decision and reason; `sources` are drafted and accepted tokens by drafter.
    """
    stats = list(every)
    reached = [sum(row) for row in zip_longest(*(each.reached_per_position for each in stats), fillvalue=0)]
    accepted = [sum(row) for row in zip_longest(*(each.accepted_per_position for each in stats), fillvalue=0)]
    steps = reached[0] if reached else 0
    drafted, kept = sum(each.num_draft_tokens for each in stats), sum(each.num_accepted_tokens for each in stats)
    decisions, of_sources = Counter[str](), dict[str, Counter[str]]()
    for each in stats:
        decisions.update(each.decisions)
        for name, source in each.sources.items():
            counts = {"num_draft_tokens": source.num_draft_tokens, "num_accepted_tokens": source.num_accepted_tokens}
            of_sources.setdefault(name, Counter()).update(counts)
    return {
        "mean_acceptance_length": 1 + kept / steps if steps else 1.0,
        "draft_acceptance_rate": kept / drafted if drafted else 0.0,
        "acceptance_histogram": [more - most for more, most in pairwise([steps, *accepted, 0])],
        "num_spec_steps": steps,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": kept,
        "num_spec_tokens": len(reached),
        "num_forwards": sum(each.num_forwards for each in stats),
        "decisions": decisions,
        "sources": of_sources,
        "seconds": {
            "draft": sum(each.time_draft for each in stats),
            "target": sum(each.time_target for each in stats),
            "verify": sum(each.time_verify for each in stats),
            "total": max((each.time_total for each in stats), default=0.0),
        },
    }


@dataclass(slots=True)
class Message:
    """A message of an answer; its attributes are whole with the last text.

    Attributes:
        parser: None if the answer is text alone.
        content: None if there are calls alone.
        calls: as OpenAI's API has them.
    """

    parser: ResponseParser | None
    one_call: bool = False
    content: str | None = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def push(self, text: str, *, last: bool) -> list[Delta]:
        """Add text, and return what it adds to the message. last: nothing follows."""
        if self.parser is None:
            self.content = (self.content or "") + text
            return [Delta(CONTENT, text)] if text else []
        deltas = self.parser.push(text)
        if last:
            deltas += self.parser.end()
            parsed = self.parser.message()
            self.content, self.reasoning = parsed.content, parsed.reasoning or ""
            self.calls = parsed.tool_calls[:1] if self.one_call else parsed.tool_calls
        return [delta for delta in deltas if not (self.one_call and delta.index)]

    def reasoning_tokens(self, tokenizer: Any) -> int:
        """Return the tokens of its reasoning."""
        return len(encode_text(tokenizer, self.reasoning, special=False)) if self.reasoning else 0


@dataclass(frozen=True, slots=True)
class Asked:
    """What is answered, and by which names.

    Attributes:
        texts: of the target.
        prompts: token ids of each of the request's prompts.
        model: the name of the model.
        name: unique among answers.
        created: Unix time in seconds.
    """

    texts: ModelTexts
    request: CompletionRequest
    prompts: Seq[Seq[int]]
    model: str
    name: str
    created: int

    def message(self, prompt: int = 0, suffix: str = "") -> Message:
        """Begin the message that answers a prompt. suffix: of its name."""
        form = self.request.response_format(self.texts)
        if form is None:
            return Message(None)
        end, name = self.texts.prompt_end(self.prompts[prompt]), self.name + suffix
        return Message(ResponseParser(form, end, self.request.tools, name), self.request.one_call)


class Chunks:
    """Makes the body or the chunks of one answer.

    Attributes:
        num_events: 0, since chunks have no numbers.
    """

    num_events = 0

    def __init__(self, asked: Asked) -> None:
        self._asked, self._texts, self._request, self._prompts = asked, asked.texts, asked.request, asked.prompts
        self._chat = asked.request.url == CHAT_URL
        kind = "chat.completion" if self._chat else "text_completion"
        self._whole = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{asked.name}",
            "object": kind,
            "created": asked.created,
            "model": asked.model,
        }
        self._head = self._whole | {"object": f"{kind}.chunk" if self._chat else kind}
        self._offsets: dict[int, Offsets] = {}  # of the choices that have begun
        self._detokenizers: dict[int, Detokenizer] = {}
        self._messages: dict[int, Message] = {}
        self._num_tokens = Counter[int]()  # of the choices so far
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
                made = self._message(prompt, index, choice) if self._chat else self._text(prompt, generation, choice)
                choices.append({"index": index, "finish_reason": choice.finish_reason, **made})
        self._stats = [choice.stats for generation in generations for choice in generation.choices]
        metrics = self._metrics() if details else {}
        return {**self._whole, "choices": choices, "usage": self._usage(generations, details), **metrics}

    def _usage(self, generations: Seq[Generation], details: bool) -> dict[str, Any]:
        reasoning = sum(each.reasoning_tokens(self._texts.tokenizer) for each in self._messages.values())
        return usage(self._request, generations, details=details, reasoning_tokens=reasoning)

    def _message(self, prompt: int, index: int, choice: Choice) -> dict[str, Any]:
        parsed = self._messages[index] = self._asked.message(prompt, f"_{index}")
        parsed.push(choice.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
        message |= _thoughts(parsed.reasoning)
        if parsed.calls:
            message["tool_calls"] = parsed.calls
        logprobs = None if choice.logprobs is None else chat_logprobs(choice.logprobs, self._texts.names)
        return {"message": message, "logprobs": logprobs, "finish_reason": _reason(choice.finish_reason, parsed)}

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
        self._num_tokens[index] += len(chunk.token_ids)
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

    def _metrics(self) -> dict[str, Any]:
        return {"metrics": {"speculative_decoding": speculation_metrics(self._stats)}}

    def _made(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """Return the chunk of one step."""
        logprobs, reason = self._logprobs(index, chunk), chunk.finish_reason
        if not self._chat:
            return self._chunk(index, chunk.text, logprobs, reason)
        message = self._messages[index]
        deltas = message.push(chunk.text, last=reason is not None)
        said, thought = ("".join(each.text for each in deltas if each.kind == kind) for kind in (CONTENT, REASONING))
        more: dict[str, Any] = _thoughts(thought)
        if calls := _calls(delta for delta in deltas if delta.kind == CALL):
            more["tool_calls"] = calls
        return self._chunk(index, said, logprobs, _reason(reason, message), **more)

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
            self._messages[index] = self._asked.message(prompt, f"_{index}")
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
        made = {**self._head, "choices": [choice]}
        if self._request.continuous_usage_stats:
            num_prompt = len(self._prompts[index // self._request.params.n])
            made["usage"] = _counts(num_prompt, self._num_tokens[index])
        return made


def _thoughts(reasoning: str) -> dict[str, str]:
    """Return the fields of what was thought, by both names that clients read."""
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


def _calls(deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Return pieces of calls as a chunk has them: one of each call, since clients take the first list as it is."""
    found: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": delta.text}
            found[delta.index] = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
        elif delta.index in found:
            found[delta.index]["function"]["arguments"] += delta.text
        else:
            found[delta.index] = {"index": delta.index, "function": {"arguments": delta.text}}
    return [*found.values()]


def _reason(reason: str | None, message: Message) -> str | None:
    return "tool_calls" if reason == "stop" and message.calls else reason
