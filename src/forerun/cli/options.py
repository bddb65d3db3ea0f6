"""Flags that several commands share. Their defaults live in forerun.config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from forerun.config import AUTO, BUNDLED_TARGET, DTYPES, SamplingParams
from forerun.errors import ConfigError, SamplingError

NO_DRAFTER = "none"
DEFAULTS = SamplingParams()

_MODEL = "The target model: 'bundled', a local folder, or a hub id."
_K = "K, draft tokens proposed in one step; 'auto' chooses for every step what is fastest, 0 is plain decoding."
SAMPLING = "Sampling"


def parse_num_draft_tokens(value: str) -> int | str:
    """K as it may be written: a number or "auto"; its range is the engine's to judge."""
    if str(value) == AUTO:
        return AUTO
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a whole number nor {AUTO!r}.") from None


ModelName = Annotated[str, typer.Option("--model", help=_MODEL, metavar="MODEL")]
DraftName = Annotated[
    str | None,
    typer.Option(help="Folder or id of the draft model.", show_default="the bundled draft for the bundled target"),
]
NumDraftTokens = Annotated[Any, typer.Option(help=_K, metavar="K|auto", parser=parse_num_draft_tokens)]
OwnNumDraftTokens = Annotated[
    Any,
    typer.Option(
        help=_K, metavar="K|auto", parser=parse_num_draft_tokens, show_default=f"the drafter's own, or {AUTO}"
    ),
]
DType = Annotated[str, typer.Option(help=f"Number format of weights and cache: {', '.join(DTYPES)}.")]
Threads = Annotated[int | None, typer.Option(help="Threads of torch.", min=1, show_default="torch's own choice")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

Temperature = Annotated[float, typer.Option(help="0 is greedy; above 0 divides the logits.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option(help="Keep the most probable tokens up to this mass.", rich_help_panel=SAMPLING)]
MinP = Annotated[
    float,
    typer.Option(help="Drop tokens below this share of the most probable one.", rich_help_panel=SAMPLING),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Penalise tokens seen in prompt or output.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, typer.Option(help="Subtracted once from tokens seen in the output.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, typer.Option(help="Subtracted per occurrence in the output.", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(help="Add VALUE to the logit of token ID. Repeatable.", metavar="ID=VALUE", rich_help_panel=SAMPLING),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens generated at most.", rich_help_panel=SAMPLING)]
MinTokens = Annotated[int, typer.Option(help="Tokens before the output may end.", rich_help_panel=SAMPLING)]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="A string that ends the output. Repeatable.", metavar="STRING", rich_help_panel=SAMPLING),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id", help="A token that ends the output. Repeatable.", metavar="ID", rich_help_panel=SAMPLING
    ),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's EOS.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None,
    typer.Option(help="Same seed, same tokens, whatever the drafter.", rich_help_panel=SAMPLING, show_default=False),
]
Choices = Annotated[int, typer.Option("--n", "-n", help="Choices to generate.", rich_help_panel=SAMPLING)]
Logprobs = Annotated[
    int | None,
    typer.Option(
        help="With --json: log-probabilities of each token and of this many most probable ones.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]
_SAMPLING_NAMES = tuple(SamplingParams.__dataclass_fields__)


def sampling_params(flags: Mapping[str, Any]) -> SamplingParams:
    """The sampling options among a command's flags; a flag that was not given keeps its default.

    Raises:
        SamplingError: out of range, contradictory, or a --logit-bias that is not ID=VALUE.
    """
    given = {name: flags[name] for name in _SAMPLING_NAMES if flags.get(name) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = _parse_biases(given["logit_bias"])
    return SamplingParams(**given)


def _parse_biases(pairs: Iterable[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token_id, _, value = pair.partition("=")
        try:
            biases[int(token_id)] = float(value)
        except ValueError:
            raise SamplingError(f"--logit-bias {pair!r} is not ID=VALUE. Example: --logit-bias 17=-2.5") from None
    return biases


def comma_list(text: str, what: str) -> list[str]:
    """The entries of a comma-separated flag.

    Raises:
        ConfigError: it holds no entry, or one twice.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries or len(set(entries)) < len(entries):
        raise ConfigError(f"{what} is {text!r}, but must be different names with commas between them.")
    return entries


def is_bundled(model: str) -> bool:
    """Whether the bundled draft fits this target."""
    return model == BUNDLED_TARGET
