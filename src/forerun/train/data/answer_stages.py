"""The stages of making answers: each keeps a journal, so that a killed run resumes and ends with the same answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from forerun.config import SamplingParams
from forerun.engine import LLM, Choice, StepOutput
from forerun.errors import ConfigError, PromptError, SamplingError
from forerun.train.corpus import hash_fraction
from forerun.train.data.answer_file import AnswerLine, ChatText
from forerun.train.data.prompt_templates import likeness, prompt_fault, writer
from forerun.train.defaults import AnswerMaking
from forerun.train.loop import StageProgress
from forerun.utils.files import digest
from forerun.utils.journal import Journal
from forerun.utils.vocabulary import encode_text
from forerun.utils.workloads import Case

Key = TypeVar("Key")
PROMPT_TOKENS = 256
"""Tokens of a prompt that the target writes, at most; one that does not end within them is left out."""
_TOP_K = 50
"""top_k of prompts that the target writes: cheaper than top_p, which sorts a whole vocabulary at every token."""
_MOST_TRIES = 8
"""Times as many prompts are written at most as are wanted."""
_WAVE = 1.3
"""Times as many prompts are written in a wave as are still wanted."""
_SEED_DIGITS = 15
"""Hexadecimal digits of a request's seed: below MAX_SEED."""


def compute(
    llm: LLM,
    waiting: deque[Key],
    request: Callable[[Key], tuple[list[int], SamplingParams]],
    stepped: Callable[[int], object] = bool,
) -> Iterator[tuple[Key, Choice | PromptError | SamplingError]]:
    """Yield each request's answer as soon as it is complete, or why it cannot be computed.

    Args:
        waiting: keys of requests, taken from the front. More may be appended while answers are taken.
        request: the prompt's token ids and the options of one of them, n being 1; it may raise PromptError.
        stepped: is told how many tokens each step gave.

    Raises:
        ForerunError: a step failed. What was unfinished is forgotten.
    """
    engine = llm.engine
    inside = dict[int, Key]()
    most = 2 * engine.config.max_batch
    try:
        while waiting or inside:
            while waiting and len(inside) < most:
                key = waiting.popleft()
                try:
                    inside[engine.add(*request(key))] = key
                except (PromptError, SamplingError) as error:
                    yield key, error
            outputs: list[StepOutput] = []
            if inside:
                outputs = engine.step()
                stepped(engine.last_step.num_tokens)
            for output in outputs:
                if output.error is not None:
                    raise output.error
                if output.choice is not None:
                    yield inside.pop(output.request_id), output.choice
    finally:
        for request_id in inside:
            engine.abort(request_id)
        while engine.has_work:
            engine.step()


@dataclass(slots=True)
class _Generated:
    """Counts the tokens of the answers of a stage, those of unfinished ones included.

    Attributes:
        most: tokens of an answer.
        num_tokens, num_finished_tokens, num_finished: tokens, those of finished answers, and how many are finished.
    """

    most: int
    num_tokens: int = 0
    num_finished_tokens: int = 0
    num_finished: int = 0

    def finish(self, num_tokens: int) -> None:
        """Count an answer of so many tokens, which are counted already, as finished."""
        self.num_finished += 1
        self.num_finished_tokens += num_tokens

    @property
    def begun(self) -> float:
        """Estimate the work on unfinished answers, in answers.

        An answer's length is all tokens over the answers that have ended: those that end first are short.
        """
        length = min(self.most, self.num_tokens / max(1, self.num_finished)) or 1.0
        return (self.num_tokens - self.num_finished_tokens) / length


class Stages:
    """The stages of one run.

    Args:
        folder: of the journals.
        head: the inputs that the answers depend on, as JSON values: journals of another run are refused.
    """

    def __init__(
        self, llm: LLM, folder: Path, head: Mapping[str, Any], options: AnswerMaking, console: Console
    ) -> None:
        self._llm = llm
        self._folder = folder
        self._head = head
        self._options = options
        self._console = console
        self.chat = ChatText(llm.tokenizer, llm.target.name)

    def own_prompts(self, count: int) -> list[Case]:
        """Have the target write `count` prompts, evenly of all kinds; fewer if too many are unusable.

        Raises:
            ConfigError: none is usable; or the journal cannot be written.
        """
        kept: dict[str, Case] = {}
        faults: Counter[str] = Counter()
        number = 0
        most = _MOST_TRIES * count
        with self._journal("prompts", {"count": count}, most) as journal:
            while len(kept) < count and number < most:
                wave = range(number, min(most, number + max(32, round(_WAVE * (count - len(kept))))))
                missing = deque(number for number in wave if not journal.has(number))
                for _ in self._computed("prompts", journal, wave.stop, missing, self._writing_request):
                    pass
                for index in wave:
                    found = journal.get(index)
                    text = found.get("answer", "").strip()
                    why = "length" if not found.get("complete") else prompt_fault(text, self._options.language)
                    if why is None and likeness(text) in kept:
                        why = "likeness"
                    if why is not None:
                        faults[why] += 1
                    elif len(kept) < count:
                        case = Case("", messages=({"role": "user", "content": text},), category=writer(index)[0])
                        kept[likeness(text)] = case
                number = wave.stop
        reasons = ", ".join(f"{name} {times:,}" for name, times in faults.most_common())
        self._console.print(f"prompts: {len(kept):,} of {number:,} kept; left out for {reasons or 'nothing'}")
        if not kept:
            raise ConfigError(
                f"{self._llm.target.name} wrote {number:,} prompts of which none can be used ({reasons}). Give prompts "
                "or text with --data."
            )
        return list(kept.values())

    def answers(self, stage: str, cases: Sequence[Case]) -> list[AnswerLine]:
        """Answer all turns of all cases; those that cannot be computed are left out.

        Raises:
            ConfigError: the journal cannot be written.
        """
        turns = [_Turn(case, number) for case in cases for number in range(max(1, len(case.turns)))]
        fingerprint = digest(*(repr(case).encode() for case in cases))
        with self._journal(stage, {"asked": fingerprint}, len(turns)) as journal:

            def follows(index: int) -> bool:
                return index < len(turns) and turns[index].number > 0

            waiting = deque(
                index
                for index in range(len(turns))
                if not journal.has(index) and (not follows(index) or journal.has(index - 1))
            )

            def request(index: int) -> tuple[list[int], SamplingParams]:
                before = self._before(journal, index, turns[index])
                if before is None:
                    raise PromptError("The turn before was not answered.")
                return self.chat.encode(turns[index].prompt(before)), self._params(stage, index, turns[index])

            for index in self._computed(stage, journal, len(turns), waiting, request):
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

    def _computed(
        self,
        stage: str,
        journal: Journal,
        total: int,
        waiting: deque[int],
        request: Callable[[int], tuple[list[int], SamplingParams]],
    ) -> Iterator[int]:
        """Compute the requests of these numbers (`compute`), and yield each when it is in the journal."""
        generated = _Generated(PROMPT_TOKENS if stage == "prompts" else self._options.max_tokens)
        with StageProgress(self._console, stage, total, journal.num_done) as progress:

            def show() -> None:
                progress.show(journal.num_done, tokens=generated.num_tokens, begun=generated.begun)

            def stepped(num_tokens: int) -> None:
                generated.num_tokens += num_tokens
                show()

            for index, choice in compute(self._llm, waiting, request, stepped):
                journal.add(index, _entry(choice))
                generated.finish(len(choice.token_ids) if isinstance(choice, Choice) else 0)
                show()
                yield index

    def _writing_request(self, index: int) -> tuple[list[int], SamplingParams]:
        opening = self.chat.user_opening(writer(index)[1])
        params = SamplingParams(
            temperature=1.0,
            top_k=_TOP_K,
            max_tokens=PROMPT_TOKENS,
            seed=self._seed("prompts", index),
            stop_token_ids=(self.chat.end_token_id,),
        )
        return encode_text(self._llm.tokenizer, opening, special=False), params

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
        """Return the messages of the turns before; None if one of them has no answer."""
        messages = []
        for number in range(turn.number):
            answer = journal.get(index - turn.number + number).get("answer")
            if not answer:
                return None
            messages.append({"role": "user", "content": turn.case.turns[number]})
            messages.append({"role": "assistant", "content": answer})
        return messages

    @contextmanager
    def _journal(self, stage: str, own_head: Mapping[str, Any], num_lines: int) -> Iterator[Journal]:
        self._folder.mkdir(parents=True, exist_ok=True)
        with Journal(self._folder / f"{stage}.journal", {**self._head, **own_head}, num_lines) as journal:
            if journal.num_done:
                self._console.print(f"{stage}: {journal.num_done:,} are there already")
            yield journal


@dataclass(frozen=True, slots=True)
class _Turn:
    """One requested answer: turn `number` of a case."""

    case: Case
    number: int

    def prompt(self, before: list[dict[str, str]] | None) -> str | list[dict[str, str]]:
        """Return the prompt that follows these messages."""
        if not self.case.turns:
            return self.case.opening
        return [*(before or []), {"role": "user", "content": self.case.turns[self.number]}]


def _entry(choice: Choice | Exception) -> dict[str, Any]:
    """Return the journal's entry of an answer."""
    if isinstance(choice, Exception):
        return {"error": str(choice)}
    complete = choice.finish_reason == "stop"
    # an answer that was cut may end within a character
    return {"answer": choice.text if complete else choice.text.rstrip("\ufffd"), "complete": complete}
