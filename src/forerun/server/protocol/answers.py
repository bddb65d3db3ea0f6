"""Answers of chats and completions, whole or as chunks of a stream: texts, log-probabilities, usage and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any, TypeAlias, TypeVar

from forerun.chat.response_format import CALL, CONTENT, REASONING
from forerun.chat.response_parser import Delta, PlainText, ResponseParser
from forerun.drafters.lookup.prediction import SOURCE
from forerun.engine.results import Choice, Generation, SequenceStats, StepOutput, StreamChunk
from forerun.engine.text import NO_MARKS, Detokenizer, TokenTexts
from forerun.sampling import TokenLogprob
from forerun.server.protocol.bodies import content_text
from forerun.server.protocol.model_texts import ModelTexts, TokenIdNames, TokenNames
from forerun.server.protocol.requests import CHAT_URL, CompletionRequest
from forerun.types import FinishReason

Message: TypeAlias = PlainText | ResponseParser
"""A message of an answer, which grows."""

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


class TokenPieces:
    """Divides a growing text among its tokens; a token within a character adds nothing.

    Args:
        before: tokens before the text, on which decoding may depend.
        texts: None if the model has no tokenizer, and so no text.
        marks: as of `Detokenizer`.
        start: of the first token, in characters.
    """

    def __init__(
        self, before: Seq[int], texts: TokenTexts | None, marks: Mapping[int, str] = NO_MARKS, start: int = 0
    ) -> None:
        self._detokenizer = None if texts is None else Detokenizer(texts, before, marks)
        self._at = start

    def push(self, token_ids: Seq[int], *, last: bool = False) -> tuple[list[int], list[str]]:
        """Return the starts, in characters, and the texts of the next tokens. last: nothing follows."""
        texts = ["" if self._detokenizer is None else self._detokenizer.push((token_id,)) for token_id in token_ids]
        if last and texts and self._detokenizer is not None:
            texts[-1] += self._detokenizer.flush()
        *starts, self._at = accumulate(map(len, texts), initial=self._at)
        return starts, texts


def prompt_starts(token_ids: Seq[int], text: str, texts: ModelTexts) -> list[int]:
    """Return the starts of a prompt's tokens in its text, which may hold special tokens, or be without them."""
    at = 0
    starts = []
    pieces = TokenPieces([], texts.texts, texts.special)
    for token_id in token_ids:
        starts.append(min(at, len(text)))
        (piece,) = pieces.push([token_id])[1]
        mark = texts.special.get(token_id, "")
        if mark and not text.startswith(mark, at + len(piece) - len(mark)):
            piece = piece.removesuffix(mark)
        at += len(piece)
    return starts


def prompt_logprobs(entries: Iterable[TokenLogprob | None], num_top: int, names: TokenNames) -> list[Any]:
    """Return the `prompt_logprobs` of an answer, in vLLM's form: of each token an object of the `num_top` most probable
    tokens and the token itself, by their ids. The rank of a token that is none of those is not known."""
    found: list[Any] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        of_token: dict[str, Any] = {}
        for rank, (token_id, logprob) in enumerate([*entry.top[:num_top], (entry.token_id, entry.logprob)], 1):
            text = names.data(token_id).decode(errors="replace")
            is_listed = rank <= min(num_top, len(entry.top))
            about = {"logprob": max(logprob, _LOWEST), "rank": rank if is_listed else None, "decoded_token": text}
            of_token.setdefault(str(token_id), about)
        found.append(of_token)
    return found


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


def metrics(every: Iterable[SequenceStats]) -> dict[str, Any]:
    """Return the `metrics` of an answer: figures of speculation of all its choices together.

    `mean_acceptance_length` is tokens per speculative step, bonus token included. `acceptance_histogram` has at index i
    the speculative steps in which i draft tokens were accepted. `num_spec_tokens` is the deepest draft. `decisions` are
    counts of steps by decision and reason; `sources` are drafted and accepted tokens by drafter.
    """
    stats = list(every)
    reached = [sum(row) for row in zip_longest(*(each.reached_per_position for each in stats), fillvalue=0)]
    accepted = [sum(row) for row in zip_longest(*(each.accepted_per_position for each in stats), fillvalue=0)]
    steps = reached[0] if reached else 0
    drafted = sum(each.num_draft_tokens for each in stats)
    kept = sum(each.num_accepted_tokens for each in stats)
    decisions = Counter[str]()
    of_sources = dict[str, Counter[str]]()
    for each in stats:
        decisions.update(each.decisions)
        for name, source in each.sources.items():
            counts = {"num_draft_tokens": source.num_draft_tokens, "num_accepted_tokens": source.num_accepted_tokens}
            of_sources.setdefault(name, Counter()).update(counts)
    found = {
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
    return {"metrics": {"speculative_decoding": found}, **grammar_warnings(stats)}


def grammar_warnings(every: Iterable[SequenceStats]) -> dict[str, list[str]]:
    """Return the `warnings` of an answer; nothing without any."""
    found = dict.fromkeys(chain.from_iterable(each.warnings for each in every))
    return {"warnings": [*found]} if found else {}


def progress_comment(progress: Mapping[str, int]) -> str:
    """Return a comment, which clients skip, on how far a request's prompts are."""
    return f"progress {json.dumps(progress)}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What is answered, and by which names.

    Attributes:
        texts: of the target.
        prompts: token ids of each of the request's prompts.
        model: the name of the model.
        name: unique among answers.
        created: Unix time in seconds.
        num_cut: tokens that were cut off before the prompts.
    """

    texts: ModelTexts
    request: CompletionRequest
    prompts: Seq[Seq[int]]
    model: str
    name: str
    created: int
    num_cut: int = 0

    def message(self, prompt: int = 0, suffix: str = "") -> Message:
        """Begin the message that answers a prompt. suffix: of its name."""
        form = self.request.response_format(self.texts)
        request = self.request
        if form is None:
            return PlainText()
        return request.parser(form, self.texts, self.prompts[prompt], self.name + suffix)


@dataclass(slots=True)
class _Growing:
    """A choice that grows.

    Attributes:
        prompt: index of its prompt.
        num_tokens: so far.
    """

    index: int
    prompt: int
    message: Message
    pieces: TokenPieces
    num_tokens: int = 0


_Given = TypeVar("_Given", Choice, StreamChunk)


def _joined(first: Mapping[str, list[Any]], second: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [*first[name], *second[name]] for name in first}


class Chunks:
    """Makes the body or the chunks of one answer.

    Attributes:
        num_events: 0, since chunks have no numbers.
    """

    num_events = 0

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._texts = asked.texts
        self._request = asked.request
        self._prompts = asked.prompts
        self._chat = asked.request.url == CHAT_URL
        kind = "chat.completion" if self._chat else "text_completion"
        self._whole = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{asked.request.request_id or asked.name}",
            "object": kind,
            "created": asked.created,
            "model": asked.model,
            **({"truncated_prompt_tokens": asked.num_cut} if asked.num_cut else {}),
        }
        self._head = self._whole | {"object": f"{kind}.chunk" if self._chat else kind}
        self._choices: dict[int, _Growing] = {}  # that have begun
        self._stats: list[SequenceStats] = []  # of those that have ended

    @cached_property
    def _names(self) -> TokenNames:
        """Return the names of tokens in log-probabilities."""
        names = self._texts.names
        return TokenIdNames(names) if self._request.returned.names_by_id else names

    def whole(self, generations: Seq[Generation], *, details: bool = True) -> dict[str, Any]:
        """Return the body of the answer.

        Args:
            generations: of each of the request's prompts.
            details: include what depends on other requests and on speculation.
        """
        choices = [
            self._whole_choice(self._choice(prompt, choice.index), generation, self._shown(choice))
            for prompt, generation in enumerate(generations)
            for choice in generation.choices
        ]
        told = metrics if details else grammar_warnings
        more = told(choice.stats for generation in generations for choice in generation.choices)
        if self._chat:
            more |= self._of_prompt(generations[0])
        return {**self._whole, "choices": choices, "usage": self._usage(generations, details), **more}

    def _shown(self, given: _Given) -> _Given:
        """Return a choice, or a part of it, without what was not asked for."""
        if not self._request.only_prompt:
            return given
        reason: FinishReason | None = None if given.finish_reason is None else "length"
        logprobs: list[TokenLogprob] | None = None if given.logprobs is None else []
        return replace(given, text="", token_ids=[], logprobs=logprobs, finish_reason=reason, stop_reason=None)

    def _of_prompt(self, generation: Generation) -> dict[str, Any]:
        """Return what was asked for of a prompt."""
        returned = self._request.returned
        found: dict[str, Any] = {"prompt_token_ids": generation.prompt_token_ids} if returned.token_ids else {}
        if returned.prompt_logprobs is not None:
            entries = generation.prompt_logprobs or []
            found["prompt_logprobs"] = prompt_logprobs(entries, returned.prompt_logprobs, self._texts.names)
        return found

    def _usage(self, generations: Seq[Generation], details: bool) -> dict[str, Any]:
        generations = [replace(each, choices=[*map(self._shown, each.choices)]) for each in generations]
        reasoning = sum(self._texts.count(choice.message.reasoning) for choice in self._choices.values())
        return usage(self._request, generations, details=details, reasoning_tokens=reasoning)

    def _choice(self, prompt: int, index: int) -> _Growing:
        """Return the choice with this index among those of a prompt; begin it if it has not begun."""
        index += prompt * self._request.params.n
        if index not in self._choices:
            marks = NO_MARKS if self._request.params.skip_special_tokens else self._texts.special
            start = 0 if self._chat else len(self._echoed(prompt))
            pieces = TokenPieces(self._prompts[prompt], self._texts.texts, marks, start)
            self._choices[index] = _Growing(index, prompt, self._asked.message(prompt, f"_{index}"), pieces)
        return self._choices[index]

    def _whole_choice(self, growing: _Growing, generation: Generation, choice: Choice) -> dict[str, Any]:
        message = growing.message
        message.push(choice.text, last=True)
        if self._chat:
            more = _beside_text(message.reasoning, message.calls)
            before = self._echoed(growing.prompt)
            said = before + (message.content or "") if before else message.content
            content = {"message": {"role": "assistant", "content": said, "refusal": None, **more}}
            return self._made(growing, choice, content)
        text = self._echoed(growing.prompt) + choice.text
        made = self._made(growing, choice, {"text": text}) | self._of_prompt(generation)
        found = made["logprobs"]
        if found is not None and self._request.echo:
            found = made["logprobs"] = _joined(self._prompt_report(generation, growing.prompt), found)
        if found is not None:  # the text may end before the last tokens do
            found["text_offset"] = [min(at, len(text)) for at in found["text_offset"]]
        return made

    def _prompt_report(self, generation: Generation, prompt: int) -> dict[str, list[Any]]:
        """Return the `logprobs` of a prompt that is echoed."""
        ids = generation.prompt_token_ids
        most = self._request.params.logprobs
        entries = [each and replace(each, top=each.top[:most]) for each in generation.prompt_logprobs or []]
        starts = prompt_starts(ids, self._echoed(prompt), self._texts)
        return completion_logprobs(ids, entries, starts, self._names)

    def _echoed(self, prompt: int) -> str:
        """Return the text with which the answer to one of the prompts begins."""
        request = self._request
        if not request.echo:
            return ""
        given: Any = request.prompts[prompt]
        if self._chat:
            last = given[-1]
            return content_text(last.get("content") or "") if last.get("role") == "assistant" else ""
        return given if isinstance(given, str) and not self._asked.num_cut else self._texts.text(self._prompts[prompt])

    def _made(self, growing: _Growing, given: Choice | StreamChunk, content: dict[str, Any]) -> dict[str, Any]:
        """Return a choice, or a part of it, as the answer has it. content: its text."""
        reason = given.finish_reason
        with_drafts = self._request.stream_options.include_drafts
        is_divided = with_drafts or given.logprobs is not None
        starts, texts = growing.pieces.push(given.token_ids, last=reason is not None) if is_divided else ([], [])
        logprobs = None
        if given.logprobs is not None and self._chat:
            logprobs = chat_logprobs(given.logprobs, self._names)
        elif given.logprobs is not None:
            logprobs = completion_logprobs(given.token_ids, given.logprobs, starts, self._names)
        ended = "tool_calls" if reason == "stop" and growing.message.calls else reason
        drafts = {"drafts": _drafts(given, texts)} if with_drafts and isinstance(given, StreamChunk) else {}
        made = {"index": growing.index, **content, "logprobs": logprobs, "finish_reason": ended, **drafts}
        if reason is not None:
            made["stop_reason"] = given.stop_reason
        return made | ({"token_ids": given.token_ids} if self._request.returned.token_ids else {})

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks that come before any output: none."""
        yield from ()

    def keep_alive(self, progress: Mapping[str, int]) -> Iterator[str | dict[str, Any]]:
        """Yield what the stream sends at once, and every `KEEP_ALIVE` seconds while a prompt is computed; a string is a
        comment. progress: `Service.progress`."""
        yield progress_comment(progress)

    def of(self, prompt: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the chunks of one output; none if there is nothing to show yet.

        Args:
            prompt: index of the prompt that it answers.
        """
        chunk = self._shown(output.chunk)
        request = self._request
        num_begun = len(self._choices)
        growing = self._choice(prompt, chunk.index)
        if len(self._choices) > num_begun and (self._chat or request.echo or request.returned.token_ids):
            text = self._echoed(prompt)
            begun = {"delta": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            made = self._chunk(growing, StreamChunk("", []), begun)
            if request.returned.token_ids:
                (made if self._chat else made["choices"][0])["prompt_token_ids"] = [*self._prompts[prompt]]
            yield made
        growing.num_tokens += len(chunk.token_ids)
        with_ids = (request.stream_options.include_drafts or request.returned.token_ids) and chunk.token_ids
        if not (chunk.text or chunk.finish_reason is not None or chunk.logprobs or with_ids):
            return
        made = self._chunk(growing, chunk, self._delta(growing, chunk))
        if output.choice is not None:
            self._stats.append(output.choice.stats)
            last = len(self._stats) == len(self._prompts) * request.params.n
            # clients look for a choice in every chunk but the usage's
            if last and not request.stream_options.include_usage:
                made |= metrics(self._stats)
        yield made

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield a last chunk, without choices, if the request includes the usage."""
        if self._request.stream_options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(generations, details=True), **metrics(self._stats)}

    def _delta(self, growing: _Growing, chunk: StreamChunk) -> dict[str, Any]:
        """Return the text that a chunk adds to its choice."""
        if not self._chat:
            return {"text": chunk.text}
        deltas = growing.message.push(chunk.text, last=chunk.finish_reason is not None)
        said, thought = ("".join(each.text for each in deltas if each.kind == kind) for kind in (CONTENT, REASONING))
        more = _beside_text(thought, _calls(delta for delta in deltas if delta.kind == CALL))
        return {"delta": {**more, "content": said}}

    def _chunk(self, growing: _Growing, chunk: StreamChunk, content: dict[str, Any]) -> dict[str, Any]:
        made = {**self._head, "choices": [self._made(growing, chunk, content)]}
        options = self._request.stream_options
        if options.include_usage and options.continuous_usage_stats:
            made["usage"] = _counts(len(self._prompts[growing.prompt]), growing.num_tokens)
        return made


def _drafts(chunk: StreamChunk, texts: Seq[str]) -> list[tuple[str, str | None]]:
    """Return (text, drafter) of each token; None for the target's own tokens, "draft" for an unnamed drafter."""
    sources = chunk.sources or ("draft",) * chunk.num_accepted_draft
    return list(zip(texts, [*sources, *[None] * (len(texts) - len(sources))], strict=True))


def _beside_text(reasoning: str, calls: Seq[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a message beside its text: calls, and thoughts by both names that clients read."""
    thoughts = {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    return thoughts | ({"tool_calls": calls} if calls else {})


def _calls(deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    """Return pieces of calls as a chunk has them: one of each call, since clients take the first list as it is."""
    found: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        head = {} if delta.name is None else {"id": delta.id, "type": "function"}
        name = {} if delta.name is None else {"name": delta.name}
        call = found.setdefault(delta.index, {"index": delta.index, **head, "function": {**name, "arguments": ""}})
        call["function"]["arguments"] += delta.text
    return [*found.values()]
