"""What publishers recommend for sampling, for files that come without a generation configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class Published:
    """The sampling options that were published with models.

    Attributes:
        options: by the names of `SamplingParams`.
        source: where they were published.
    """

    options: Mapping[str, float]
    source: str


@dataclass(frozen=True, slots=True)
class _Family:
    """A row of the table.

    Attributes:
        name: found in a model's name, in small letters with dashes for blanks and underscores.
        most: billions of parameters of the largest.
    """

    name: str
    options: Mapping[str, float]
    source: str
    most: float = float("inf")


_QWEN: dict[str, float] = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
_THINKING: dict[str, float] = {"temperature": 0.6, "top_p": 0.95}

FAMILIES = (
    _Family(r"r1-distill", _THINKING, f"{_GENERATION_CONFIG} of DeepSeek-R1-Distill"),
    _Family(r"qwen-?3-coder", _QWEN | {"repetition_penalty": 1.05}, f"{_GENERATION_CONFIG} of Qwen3-Coder"),
    _Family(r"qwen-?3(?![\w.]).*instruct-2507", _QWEN, f"{_GENERATION_CONFIG} of Qwen3-Instruct-2507"),
    _Family(r"^(?!.*\bbase\b).*qwen-?3(?![\w.])", _THINKING | {"top_k": 20}, f"{_GENERATION_CONFIG} of Qwen3"),
    _Family(
        r"qwen-?2(\.5)?-.*(instruct|chat)",
        _QWEN | {"repetition_penalty": 1.1},
        f"{_GENERATION_CONFIG} of Qwen2.5-Instruct and Qwen2.5-Coder-Instruct up to 1.5B",
        most=2,
    ),
    _Family(
        r"qwen-?2(\.5)?-.*(instruct|chat)",
        _QWEN | {"repetition_penalty": 1.05},
        f"{_GENERATION_CONFIG} of Qwen2.5-Instruct and Qwen2.5-Coder-Instruct",
    ),
    _Family(
        r"llama-?3(?!\d)", {"temperature": 0.6, "top_p": 0.9}, f"{_GENERATION_CONFIG} of Llama 3, 3.1, 3.2 and 3.3"
    ),
    _Family(r"gemma-?3", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}, f"{_GENERATION_CONFIG} of Gemma 3"),
    _Family(r"magistral", {"temperature": 0.7, "top_p": 0.95}, "the model card of Magistral"),
    _Family(r"(mistral|devstral)-small", {"temperature": 0.15}, f"{_GENERATION_CONFIG} of Mistral-Small-24B-Instruct"),
    _Family(r"mistral-nemo", {"temperature": 0.3}, "the model card of Mistral-Nemo-Instruct"),
    _Family(r"smollm-?3", _THINKING, "the model card of SmolLM3"),
    _Family(r"smollm-?2.*instruct", {"temperature": 0.2, "top_p": 0.9}, "the model card of SmolLM2-Instruct"),
    _Family(
        r"phi-?4.*reasoning",
        {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
        "the model card of Phi-4-reasoning",
    ),
    _Family(r"gpt-oss", {"temperature": 1.0}, "the model card of gpt-oss"),
)
"""The first row that fits a name counts. Families that are not named publish no options: Gemma 2, Mistral-7B-Instruct,
Phi-3 and Phi-4."""

LLAMA_CPP = Published({"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}, "llama.cpp's defaults")


def published_sampling(name: str, num_parameters: int) -> Published:
    """Return the options of a model's family; those of llama.cpp for families that are not known.

    name: all that its files say of its name.
    """
    text = re.sub(r"[\s_]+", "-", name.lower())
    billions = num_parameters / 1e9
    found = (each for each in FAMILIES if billions <= each.most and re.search(each.name, text))
    family = next(found, None)
    return LLAMA_CPP if family is None else Published(family.options, family.source)
