"""The schema of measured results, version 1: what a measuring command writes, and what reports and comparisons read.

A file holds one object. Its lists are flat, and name what they are of by labels, so that one reader serves every kind:
`rows` are single runs, `figures` are what they come to, with intervals, and `tables` are what the command printed.
Times are in seconds, shares in 0..1. A number that is missing is null; NaN and infinity are not written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.kernels.provenance import Environment

FORMAT = "forerun.results"
"""The value of `format`, by which the file is recognised."""
VERSION = 1
"""Of the schema. It rises when a reader of the former version would misread a file."""
KINDS: Mapping[str, str] = {
    "generate": "Whole generations",
    "demo": "The demonstration",
    "acceptance": "Acceptance",
    "forward": "One forward",
    "serve": "Servers under load",
    "agent": "An agent's day",
    "quality": "What the weights' format costs",
    "replay": "The automatic K by measured costs",
    "peers": "Beside other engines",
    "tune": "Tuning",
    "audit": "Audit of losslessness",
    "plan": "Plan",
    "journal": "Traffic of a server",
}
"""What was measured, and the title of such a section, in the order in which reports show them."""


FIGURES: Mapping[str, tuple[str, str]] = {
    "tokens_per_second": ("tokens/s", "tokens per second"),
    "decoding": ("tokens/s", "tokens per second after the first"),
    "over_plain": ("times", "speed over plain decoding"),
    "over_transformers": ("times", "speed over Transformers' plain generate"),
    "over_assisted": ("times", "speed over Transformers' assisted generation"),
    "over_baseline": ("times", "speed over the baseline"),
    "acceptance_length": ("tokens", "mean acceptance length"),
    "acceptance_rate": ("share", "acceptance rate"),
    "position_acceptance": ("share", "acceptance at a draft position, of drafts that reach it"),
    "first_token": ("s", "time to first token"),
    "first_token_p90": ("s", "time to first token, 90th percentile"),
    "first_token_p99": ("s", "time to first token, 99th percentile"),
    "per_token": ("s", "time per token after the first"),
    "between_pieces": ("s", "time between pieces of an answer"),
    "whole_request": ("s", "time of a whole request"),
    "requests_per_second": ("requests/s", "whole answers per second"),
    "goodput": ("requests/s", "requests per second that keep the goal"),
    "client_cpu": ("processors", "processors that the client kept busy"),
    "failed": ("share", "requests without a whole answer"),
    "same_text": ("share", "answers equal to plain decoding's"),
    "same_as_forerun": ("share", "answers equal to those of forerun's plain decoding"),
    "shared_prefix": ("tokens", "first tokens equal to those of forerun's plain decoding"),
    "forward": ("s", "time of a forward"),
    "forward_over_transformers": ("times", "time of a forward over Transformers'"),
    "forward_growth": ("times", "time of a forward over that of one row"),
    "roofline": ("s", "least time of a forward by bandwidth and arithmetic"),
    "perplexity": ("", "perplexity"),
    "perplexity_lost": ("share", "perplexity lost"),
    "divergence": ("nats", "Kullback-Leibler divergence"),
    "agreement": ("share", "top-1 agreement"),
    "compared": ("", "answers or samples that were compared"),
    "found": ("share", "smallest deviation that would have been found with probability 0.9"),
    "p_value": ("", "p-value"),
}
"""Unit and title of each figure that has a name: "times" is a ratio, "share" lies in 0..1. Others have no unit."""

Label = str | int | float
Labels = Mapping[str, Label]
"""The labels of a figure. Common ones: workload, category ("" for all), temperature, method, drafter, position, rows,
sequences, outstanding, batch, dtype, part."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The model that was measured.

    Attributes:
        name: as the user gave it.
        number_format: of its weights, in words.
        quantize, adapter: as given; None without.
        cost_padded: it has the text of a smaller model, at a larger one's cost.
        random_weights: they are random, so its text and its acceptance mean nothing.
        exact: whether speculation gives the same bits, by the self-test at load; None where it is unknown.
        num_parameters: of its weights; None where unknown.
    """

    name: str
    number_format: str = ""
    quantize: str | None = None
    adapter: str | None = None
    cost_padded: bool = False
    random_weights: bool = False
    exact: bool | None = None
    num_parameters: int | None = None


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """One drafter.

    Attributes:
        name: in labels and rows.
        text: what LLM is given, options included.
        num_draft_tokens: values of K that were measured; "auto" is one.
        seen: how many of the prompts share 13 words in a row with what it was made from; None where that is unknown.
        seen_source: how `seen` was found, for people.
    """

    name: str
    text: str
    num_draft_tokens: Sequence[int | str] = ()
    seen: int | None = None
    seen_source: str = ""


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """One prompt; the text is not kept.

    Attributes:
        id: unique within its workload.
        workload: name or file name.
        category: empty without one.
        num_tokens: of the prompt: the context length at which the answer begins.
        digest: of its token ids, by which two files are seen to hold the same prompt.
        random: drawn token ids, not a text.
    """

    id: str
    workload: str
    category: str
    num_tokens: int
    digest: str = ""
    random: bool = False


@dataclass(frozen=True, slots=True)
class RunRow:
    """One generation: one prompt, one method, one round.

    Attributes:
        prompt: index in `prompts`.
        method: such as "forerun, suffix, auto".
        drafter: the drafter's name; empty without one.
        temperature: 0 is greedy.
        round: runs of one round were measured beside each other.
        num_tokens: generated.
        seconds: of the whole generation.
        num_forwards: target forwards that gave tokens; 0 where unknown.
        num_drafted, num_accepted: draft tokens.
        reached: [position] drafts that had a token there below what was accepted before it.
        accepted: [position] how many of these tokens were accepted.
        first_token: seconds to the first token; None where unknown.
        same_text: whether its tokens are those of plain decoding in the same round; None where there was none.
    """

    prompt: int
    method: str
    drafter: str
    temperature: float
    round: int
    num_tokens: int
    seconds: float
    num_forwards: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    reached: Sequence[int] = ()
    accepted: Sequence[int] = ()
    first_token: float | None = None
    same_text: bool | None = None

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / max(1, self.num_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Return the tokens per target forward; None where unknown."""
        return self.num_tokens / self.num_forwards if self.num_forwards else None


@dataclass(frozen=True, slots=True)
class Figure:
    """What a measurement came to.

    Attributes:
        name: of FIGURES, or another.
        labels: what it is of.
        value: a median or a mean; None where it could not be had (not a number).
        low, high: its 95 % interval; None without one.
        samples: how many runs are behind it; None where unknown.
    """

    name: str
    labels: Labels
    value: float | None
    low: float | None = None
    high: float | None = None
    samples: int | None = None

    @property
    def unit(self) -> str:
        """Return the unit of the value, empty if the figure has none."""
        return FIGURES.get(self.name, ("", ""))[0]


@dataclass(frozen=True, slots=True)
class TableFacts:
    """A table as the command printed it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Results:
    """All that one command measured.

    Attributes:
        kind: of KINDS.
        command: as it was typed, without the folders of this machine's own.
        environment: where and when.
        target: None where no model was measured.
        settings: the options that matter, by name: numbers, texts and lists.
        drafters, prompts, rows, figures, tables: see their classes.
        details: whatever else a kind keeps, for its own reader (costs of a replay, decisions of a tuner).
        source: the file that it was read from, for messages; not written.
    """

    kind: str
    command: str
    environment: Environment
    target: TargetFacts | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    drafters: Sequence[DrafterFacts] = ()
    prompts: Sequence[PromptFacts] = ()
    rows: Sequence[RunRow] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[TableFacts] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def file_name(self) -> str:
        """Return the name of the source without its folders."""
        return self.source.replace("\\", "/").rpartition("/")[2]
