"""llama.cpp's `/infill`, which llama.vim and llama.vscode call: bodies, and answers whole or as events.

Fields and answers are those of `tools/server/README.md`. What of its sampling is not there is refused, unless its value
has no effect.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence as Seq
from functools import cache
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from forerun.chat.infill import Infill
from forerun.engine.results import Choice, Generation, StepOutput
from forerun.server.protocol.answers import Asked, grammar_warnings, progress_comment
from forerun.server.protocol.bodies import Count, GenerationBody, Strings
from forerun.server.protocol.requests import INFILL_URL, CompletionRequest, TextLimits

_WITHOUT_EFFECT = frozenset(("cache_prompt", "id_slot", "t_max_prompt_ms", "timings_per_token", "n_keep"))
"""Fields that change no text here, whatever their value."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repeat_last_n": (0, 64),
    "dynatemp_range": (0,),
    "dynatemp_exponent": (1,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "n_probs": (0,),
    "min_keep": (0, 1),
    "lora": ([],),
}
"""Fields of samplers that are not there, and their values without effect."""
_OPTIONS: Mapping[str, Mapping[str, float]] = {
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
"""Names of samplers -> what stands for each where `samplers` leaves it out."""
_SUREST = "infill"
"""llama.cpp's sampler that drops all but the surest tokens. The most probable one is taken in its place; for several
answers, those that are not much less probable."""
_LEAST_OF_SUREST = 0.2


class ExtraFile(TypedDict):
    """A file, or a part of one, beside the one with the cursor."""

    text: str
    filename: NotRequired[str]
    time: NotRequired[Any]


class InfillBody(GenerationBody):
    """The body of /infill."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = Field(None, description="a text: what of the cursor's line stands before it")
    input_extra: Annotated[list[ExtraFile], Field(fail_fast=True)] | None = Field(
        None, description='a list of {"filename": ..., "text": ...}'
    )
    n: None = Field(None, description="left out: n_cmpl is how many answers there are")
    n_cmpl: Count | None = None
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    n_indent: Annotated[int, Field(ge=0)] | None = None
    t_max_predict_ms: float | None = None
    samplers: Strings | None = None
    repeat_penalty: float | None = None
    response_fields: Strings | None = None
    return_tokens: bool | None = None

    def check_others(self) -> None:
        """Raise RequestBodyError for fields that would have an effect, and are none of the model's."""
        others = self.model_extra or {}
        for name in [*others]:
            if name in _WITHOUT_EFFECT or others[name] in _NEUTRAL.get(name, ()):
                del others[name]
        super().check_others()

    def request(self, context_length: int, own: Mapping[str, Any], kept: object = None) -> CompletionRequest:
        """Return the request; arguments as of `ChatBody`. Raises RequestBodyError."""
        count = -1 if self.n_predict is None else self.n_predict
        others: dict[str, Any] = {"max_tokens": context_length if count < 0 else max(count, 1)}
        others["n"] = self.n_cmpl or 1
        if self.repeat_penalty is not None:
            others["repetition_penalty"] = self.repeat_penalty
        if (self.seed or 0) < 0:
            others["seed"] = None
        params = self.params(own, **others | self._by_samplers(others["n"]))
        extra = [(file.get("filename") or "tmp", file["text"]) for file in self.input_extra or ()]
        before = self.input_prefix + (self.prompt or "")
        return CompletionRequest(
            INFILL_URL,
            self.model,
            [Infill(before, self.input_suffix, extra)],
            params,
            "input_prefix",
            stream=bool(self.stream),
            only_prompt=count == 0,
            limits=TextLimits(self.n_indent or 0, max(self.t_max_predict_ms or 0, 0) / 1000),
            repeated={"fields": self.response_fields or [], "tokens": bool(self.return_tokens), "n_predict": count},
        )

    def _by_samplers(self, count: int) -> dict[str, Any]:
        """Return the options of samplers that `samplers` leaves out, without effect, and what stands for _SUREST.

        count: of answers.
        """
        if self.samplers is None:
            return {}
        found: dict[str, Any] = {}
        for name, values in _OPTIONS.items():
            found |= {} if name in self.samplers else values
        if _SUREST in self.samplers:
            found |= {"temperature": 0.0} if count == 1 else {"min_p": _LEAST_OF_SUREST}
        return found


_SHOWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class InfillAnswers:
    """Makes the body or the events of one answer.

    Attributes:
        num_events: 0, since events have no numbers.
    """

    num_events = 0

    def __init__(self, asked: Asked) -> None:
        (self._prompt,) = asked.prompts
        self._asked = asked
        self._num_tokens = Counter[int]()  # of each choice

    def whole(self, generations: Seq[Generation]) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the body of the answer; a list of several."""
        is_shown = not self._asked.request.only_prompt
        ends = [self._end(choice, choice.text if is_shown else "") for choice in generations[0].choices]
        return ends if len(ends) > 1 else ends[0]

    def begun(self) -> Iterator[dict[str, Any]]:
        """Yield the events that come before any output: none."""
        yield from ()

    def keep_alive(self, progress: Mapping[str, int]) -> Iterator[str]:
        """Yield a comment, while the prompt is computed (`Chunks.keep_alive`)."""
        yield progress_comment(progress)

    def of(self, prompt: int, output: StepOutput) -> Iterator[dict[str, Any]]:
        """Yield the event of one output, if it has text."""
        chunk = output.chunk
        self._num_tokens[chunk.index] += len(chunk.token_ids)
        if chunk.text and not self._asked.request.only_prompt:
            yield {
                "index": chunk.index,
                "content": chunk.text,
                "tokens": chunk.token_ids,
                "stop": False,
                "tokens_predicted": self._num_tokens[chunk.index],
                "tokens_evaluated": len(self._prompt),
            }

    def last(self, generations: Seq[Generation]) -> Iterator[dict[str, Any]]:
        """Yield the events that end the stream, one of each answer."""
        for choice in generations[0].choices:
            yield self._end(choice, "")

    def _end(self, choice: Choice, text: str) -> dict[str, Any]:
        request = self._asked.request
        ids = [] if request.only_prompt else choice.token_ids
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        params = request.params
        warnings = grammar_warnings([choice.stats])
        whole = {
            "index": choice.index,
            "content": text,
            "tokens": ids if request.repeated["tokens"] else [],
            "stop": True,
            "model": self._asked.model,
            "tokens_predicted": len(ids),
            "tokens_evaluated": len(self._prompt),
            "generation_settings": {
                **{name: getattr(params, name) for name in _SHOWN},
                "seed": params.seed,
                "n_predict": request.repeated["n_predict"],
            },
            "has_new_line": "\n" in choice.text,
            "truncated": bool(warnings),
            "stop_type": _stop_type(choice, word),
            "stopping_word": word,
            "tokens_cached": len(self._prompt) + max(len(ids) - 1, 0),
            "timings": self._timings(choice, len(ids)),
            **warnings,
        }
        paths = request.repeated["fields"]
        return {path: found[0] for path in paths if (found := _at(whole, path))} if paths else whole

    def _timings(self, choice: Choice, num_tokens: int) -> dict[str, Any]:
        """Return how many tokens were computed for the prompt and the answer, and in how many milliseconds."""
        stats = choice.stats
        seconds = {"prompt": stats.time_first_token, "predicted": stats.time_total - stats.time_first_token}
        counts = {"prompt": len(self._prompt) - stats.num_cached_tokens, "predicted": num_tokens}
        found: dict[str, Any] = {"cache_n": stats.num_cached_tokens}
        for name, count in counts.items():
            found |= {
                f"{name}_n": count,
                f"{name}_ms": 1000 * seconds[name],
                f"{name}_per_token_ms": 1000 * seconds[name] / max(count, 1),
                f"{name}_per_second": count / max(seconds[name], 1e-9),
            }
        if stats.num_draft_tokens:
            found |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
        return found


def _stop_type(choice: Choice, word: str) -> str:
    """Return why an answer has ended, in llama.cpp's words. word: the stop string that has ended it."""
    if choice.finish_reason != "stop":
        return "limit"
    return "word" if word else "eos"


def _at(value: Any, path: str) -> list[Any]:
    """Return a list of what stands in an object at a path such as "timings/prompt_n"; empty if nothing does."""
    for key in path.split("/"):
        if not isinstance(value, dict) or key not in value:
            return []
        value = value[key]
    return [value]


class LimitedText:
    """Ends a growing answer as `TextLimits` say, and cuts what comes after that.

    Attributes:
        is_over: it has ended.
    """

    def __init__(self, limits: TextLimits) -> None:
        self._limits = limits
        self._text = ""
        self._started: float | None = None
        self.is_over = False

    def push(self, output: StepOutput) -> None:
        """Add the text of an output, whose chunk and choice are changed where the answer has ended."""
        chunk = output.chunk
        if chunk.token_ids and self._started is None:
            self._started = time.monotonic()
        chunk.text = "" if self.is_over else self._kept(chunk.text)
        if output.choice is not None and self.is_over:
            output.choice.text = self._text
            output.choice.finish_reason = chunk.finish_reason = "length"
            output.choice.stop_reason = chunk.stop_reason = None

    def _kept(self, new: str) -> str:
        """Return what of the next text belongs to the answer."""
        limits = self._limits
        before = len(self._text)
        self._text += new
        if limits.indent and (line := _shallow_line(limits.indent).search(self._text)):
            self.is_over = True
            self._text = self._text[: line.end()]
        elif limits.seconds and "\n" in new and self._started is not None:
            self.is_over = time.monotonic() - self._started > limits.seconds
        return self._text[before:]


@cache
def _shallow_line(indent: int) -> re.Pattern[str]:
    """Return a pattern of the end of a line, and the blanks of the next one, of which there are too few."""
    return re.compile(rf"\n[ \t]{{0,{indent - 1}}}(?=[^ \t])")
