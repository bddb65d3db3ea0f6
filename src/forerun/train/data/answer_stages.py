"""The stages of making answers: each keeps a journal, so that a killed run goes on where it was and ends alike."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from forerun.config import SamplingParams
from forerun.engine import LLM, Choice
from forerun.errors import ConfigError, PromptError, SamplingError
from forerun.train.corpus import hash_fraction
from forerun.train.data.answer_file import AnswerLine, ChatText
from forerun.train.data.mixture import fault, likeness, writer
from forerun.train.defaults import AnswerMaking
from forerun.utils.files import digest
from forerun.utils.journal import Journal
from forerun.utils.vocabulary import encode_text
from forerun.utils.workloads import Case

K = TypeVar("K")


def compute(
    llm: LLM, waiting: deque[K], request: Callable[[K], tuple[list[int], SamplingParams]]
) -> Iterator[tuple[K, Choice | PromptError | SamplingError]]:
    """Each request's answer as soon as it is there, or why it cannot be served.

    Args:
        waiting: what is asked, taken from the front. More may be appended while answers are taken.
        request: the prompt's token ids and the options of one of them, n being 1; it may raise PromptError.

    Raises:
        ForerunError: a step failed. What was unfinished is forgotten.
    """
    engine, inside = llm.engine, dict[int, K]()
    most = 2 * engine.config.max_batch
    try:
        while waiting or inside:
            while waiting and len(inside) < most:
                key = waiting.popleft()
                try:
                    inside[engine.add(*request(key))] = key
                except (PromptError, SamplingError) as error:
                    yield key, error
            for output in engine.step() if inside else ():
                if output.error is not None:
                    raise output.error
                if output.choice is not None:
                    yield inside.pop(output.request_id), output.choice
    finally:
        for request_id in inside:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()


PROMPT_TOKENS = 256
"""Tokens of a prompt that the target writes, at most; one that does not end within them is left out."""
_TOP_K = 50
"""Of prompts that the target writes. Cheaper than top_p, which sorts a whole vocabulary at every token."""
_MOST_TRIES = 8
"""Times as many prompts are written at most as are wanted."""
_WAVE = 1.3
"""Times as many prompts are written in a wave as are still wanted."""
_SEED_DIGITS = 15
"""Hexadecimal digits of a request's seed: below MAX_SEED."""
_PROGRESS_SECONDS = 10.0


class Stages:
    """What a run computes.

    Args:
        folder: of the journals.
        head: what the answers depend on, as JSON values: journals of another run are refused.
    """

    def __init__(
        self, llm: LLM, folder: Path, head: Mapping[str, Any], options: AnswerMaking, console: Console
    ) -> None:
        self._llm, self._folder, self._head, self._options, self._console = llm, folder, head, options, console
        self.chat = ChatText(llm.tokenizer, llm.target.name)

    def own_prompts(self, count: int) -> list[Case]:
        """`count` prompts that the target writes, of all kinds alike; fewer if too many are unusable.

        Raises:
            ConfigError: none is usable; or the journal cannot be written.
        """
        kept: dict[str, Case] = {}
        faults: Counter[str] = Counter()
        number, most = 0, _MOST_TRIES * count
        with self._journal("prompts", {"count": count}, most) as journal:
            progress = _Progress(self._console, "prompts", count, self._options.max_batch)
            while len(kept) < count and number < most:
                wave = range(number, min(most, number + max(32, round(_WAVE * (count - len(kept))))))
                missing = deque(place for place in wave if not journal.has(place))
                for place, choice in compute(self._llm, missing, self._writing):
                    journal.add(place, _written(choice))
                    progress.show(min(count, journal.num_done), choice)
                for place in wave:
                    found = journal.get(place)
                    text = found.get("answer", "").strip()
                    why = "length" if not found.get("complete") else fault(text, self._options.language)
                    if why is None and likeness(text) in kept:
                        why = "likeness"
                    if why is not None:
                        faults[why] += 1
                    elif len(kept) < count:
                        case = Case("", messages=({"role": "user", "content": text},), category=writer(place)[0])
                        kept[likeness(text)] = case
                number = wave.stop
        told = ", ".join(f"{name} {times:,}" for name, times in faults.most_common())
        self._console.print(f"prompts: {len(kept):,} of {number:,} kept; left out for {told or 'nothing'}")
        if not kept:
            raise ConfigError(
                f"{self._llm.target.name} wrote {number:,} prompts of which none can be used ({told}). Give prompts "
                "or text with --data."
            )
        return list(kept.values())

    def answers(self, stage: str, cases: Sequence[Case]) -> list[AnswerLine]:
        """The target's answers to all turns of all cases; those that it cannot be asked are left out.

        Raises:
            ConfigError: the journal cannot be written.
        """
        turns = [_Turn(case, place) for case in cases for place in range(max(1, len(case.turns)))]
        asked = digest(*(repr(case).encode() for case in cases))
        with self._journal(stage, {"asked": asked}, len(turns)) as journal:
            progress = _Progress(self._console, stage, len(turns), self._options.max_batch)

            def follows(index: int) -> bool:
                return index < len(turns) and turns[index].place > 0

            waiting = deque(
                index
                for index in range(len(turns))
                if not journal.has(index) and (not follows(index) or journal.has(index - 1))
            )

            def request(index: int) -> tuple[list[int], SamplingParams]:
                return self._asking(stage, index, turns[index], self._before(journal, index, turns[index]))

            for index, choice in compute(self._llm, waiting, request):
                journal.add(index, _written(choice))
                progress.show(journal.num_done, choice)
                if follows(index + 1) and not journal.has(index + 1):
                    waiting.append(index + 1)
            made = []
            left_out: Counter[str] = Counter()
            for index, turn in enumerate(turns):
                found = journal.get(index)
                if not found.get("answer"):
                    left_out[found.get("error", "an empty answer")] += 1
                    continue
                temperature = self._params(stage, index, turn).temperature
                prompt = turn.prompt(self._before(journal, index, turn))
                made.append(
                    AnswerLine(turn.case.category, temperature, prompt, found["answer"], True, found["complete"])
                )
        for why, times in left_out.most_common(3):
            self._console.print(f"{stage}: {times:,} left out: {why}", soft_wrap=True, highlight=False)
        return made

    def _writing(self, place: int) -> tuple[list[int], SamplingParams]:
        opening = self.chat.user_opening(writer(place)[1])
        params = SamplingParams(
            temperature=1.0,
            top_k=_TOP_K,
            max_tokens=PROMPT_TOKENS,
            seed=self._seed("prompts", place),
            stop_token_ids=(self.chat.end_token_id,),
        )
        return encode_text(self._llm.tokenizer, opening, special=False), params

    def _asking(
        self, stage: str, index: int, turn: _Turn, before: list[dict[str, str]] | None
    ) -> tuple[list[int], SamplingParams]:
        if before is None:
            raise PromptError("The turn before was not answered.")
        return self.chat.encode(turn.prompt(before)), self._params(stage, index, turn)

    def _params(self, stage: str, index: int, turn: _Turn) -> SamplingParams:
        temperature = turn.case.temperature
        if temperature is None:
            drawn = hash_fraction(f"{self._options.seed} {stage} temperature {index}") < self._options.sampled_share
            temperature = 1.0 if drawn else 0.0
        seed = self._seed(stage, index) if temperature else None
        return SamplingParams(temperature=temperature, max_tokens=self._options.max_tokens, seed=seed)

    def _seed(self, stage: str, index: int) -> int:
        return int(digest(f"{self._options.seed} {stage} {index}".encode())[:_SEED_DIGITS], 16)

    def _before(self, journal: Journal, index: int, turn: _Turn) -> list[dict[str, str]] | None:
        """The messages of the turns before; None if one of them has no answer."""
        messages = []
        for place in range(turn.place):
            answer = journal.get(index - turn.place + place).get("answer")
            if not answer:
                return None
            messages.append({"role": "user", "content": turn.case.turns[place]})
            messages.append({"role": "assistant", "content": answer})
        return messages

    @contextmanager
    def _journal(self, stage: str, more: Mapping[str, Any], num_lines: int) -> Iterator[Journal]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with Journal(self._folder / f"{stage}.journal", {**self._head, **more}, num_lines) as journal:
            if journal.num_done:
                self._console.print(f"{stage}: {journal.num_done:,} are there already")
            yield journal


@dataclass(frozen=True, slots=True)
class _Turn:
    """One answer that is wanted: turn `place` of a case."""

    case: Case
    place: int

    def prompt(self, before: list[dict[str, str]] | None) -> str | list[dict[str, str]]:
        """What the target is asked, after these messages."""
        if not self.case.turns:
            return self.case.opening
        return [*(before or []), {"role": "user", "content": self.case.turns[self.place]}]


def _written(choice: Choice | Exception) -> dict[str, Any]:
    """What a journal keeps of an answer."""
    if isinstance(choice, Exception):
        return {"error": str(choice)}
    complete = choice.finish_reason == "stop"
    # an answer that was cut may end within a character
    return {"answer": choice.text if complete else choice.text.rstrip("\ufffd"), "complete": complete}


class _Progress:
    """How far a stage has come, every ten seconds.

    enough: answers after which the time that is left is told: the first of a batch come after the whole time of one.
    """

    def __init__(self, console: Console, stage: str, total: int, enough: int) -> None:
        self._console, self._stage, self._total, self._enough = console, stage, total, enough
        self._start = self._shown = time.monotonic()
        self._done = self._tokens = 0

    def show(self, count: int, choice: Choice | Exception) -> None:
        """Another answer is there."""
        self._done += 1
        self._tokens += len(choice.token_ids) if isinstance(choice, Choice) else 0
        now = time.monotonic()
        if now - self._shown < _PROGRESS_SECONDS:
            return
        self._shown, seconds = now, now - self._start
        line = f"{self._stage}: {count:,} of {self._total:,} · {self._tokens / seconds:,.0f} tokens/s"
        if self._done >= self._enough:
            line += f" · about {(self._total - count) * seconds / self._done / 60:,.0f} minutes left"
        self._console.print(line, highlight=False)
