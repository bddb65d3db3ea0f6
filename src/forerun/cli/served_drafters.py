"""The drafters of a server, by its flags: --drafter, --draft-model, and --speculative-config as vLLM writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.config import AUTO, NO_DRAFTER
from forerun.drafters.parse_text import K_OPTION
from forerun.errors import ConfigError
from forerun.files.json_file import Fields

_PREDICTION = "prediction"
_METHODS = {
    "ngram": "prompt-lookup",
    "suffix": "suffix",
    "draft_model": "draft-model",
    "eagle": "eagle",
    "eagle3": "eagle",
}
"""vLLM's names of methods that there are here too."""
_WITH_MODEL = ("draft-model", "eagle")
_COMMON = ("method", "model", "num_speculative_tokens")
_PLACE = "--speculative-config"


def served_drafters(
    drafters: Sequence[str], draft_model: str | None, speculative_config: str | None
) -> str | list[str]:
    """The texts of the drafters to load; requests without a choice have the first. NO_DRAFTER: plain decoding.

    `prediction` is always among them, for requests that bring one.

    Raises:
        ConfigError: two flags say different things, or one of them cannot be done.
    """
    given = [
        flag
        for flag, value in (
            ("--drafter", drafters),
            ("--draft-model", draft_model),
            (_PLACE, speculative_config),
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both say who drafts. Give one of them.")
    if speculative_config is not None:
        drafters = [_of_vllm(speculative_config)]
    elif draft_model is not None:
        drafters = [f"draft-model:model={draft_model}"]
    elif not drafters:
        drafters = [AUTO]
    if NO_DRAFTER in drafters:
        if len(drafters) > 1:
            raise ConfigError(f"--drafter is {NO_DRAFTER!r}, and others too. Give it alone, or leave it out.")
        return NO_DRAFTER
    has_prediction = any(text.partition(":")[0] == _PREDICTION for text in drafters)
    return [*drafters] if has_prediction else [*drafters, _PREDICTION]


def _of_vllm(text: str) -> str:
    """The drafter's text for a speculative configuration of vLLM's."""
    fields = Fields.parse(text, _PLACE, ConfigError, remedy='Give an object such as {"method": "ngram"}.')
    default = "draft_model" if "model" in fields else None
    method = fields.string("method", default, choices=tuple(_METHODS))
    if method is None:
        raise fields.wrong("method", f"one of {', '.join(_METHODS)}")
    name = _METHODS[method]
    options: dict[str, Any] = {}
    allowed = [*_COMMON]
    if name in _WITH_MODEL:
        options["model"] = fields.string("model")
    if name == "prompt-lookup":
        allowed += ["prompt_lookup_min", "prompt_lookup_max"]
        options["min_ngram"] = fields.integer("prompt_lookup_min", None, low=1)
        options["max_ngram"] = fields.integer("prompt_lookup_max", None, low=1)
    options[K_OPTION] = fields.integer("num_speculative_tokens", None, low=0)
    if name not in _WITH_MODEL:
        allowed.remove("model")
    odd = sorted(set(fields.values) - set(allowed))
    if odd:
        raise ConfigError(
            f"{_PLACE}: {', '.join(odd)} cannot be had here with the method {method!r}. Leave it out, or choose the "
            "drafter with --drafter, which has options of its own."
        )
    written = ",".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return f"{name}:{written}" if written else name
