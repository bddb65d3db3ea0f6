"""Public drafts of well-known targets, as their pages on the Hugging Face Hub describe them.

Only what could be looked up is listed: name, size of the safetensors, licence. Whoever fetches one accepts its licence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_APACHE = "apache-2.0"
_GGUF = ("-gguf", ".gguf")


@dataclass(frozen=True, slots=True)
class PublicDraft:
    """One draft.

    Attributes:
        name: its hub id.
        drafter: the drafter that it is for; "{}" stands for its name.
        parameters: how many.
        nbytes: of its safetensors.
        licence: as its page gives it.
        targets: hub ids that it shares a tokenizer with, or was trained for.
    """

    name: str
    drafter: str
    parameters: float
    nbytes: float
    licence: str
    targets: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the drafter's text."""
        return self.drafter.format(self.name)


def _family(owner: str, pattern: str, sizes: str) -> tuple[str, ...]:
    return tuple(f"{owner}/{pattern.format(size)}" for size in sizes.split())


PUBLIC_DRAFTS: Sequence[PublicDraft] = (
    PublicDraft(
        "Qwen/Qwen2.5-0.5B-Instruct",
        "draft-model:model={}",
        0.49e9,
        988e6,
        _APACHE,
        _family("Qwen", "Qwen2.5-{}-Instruct", "1.5B 3B 7B 14B 32B 72B"),
    ),
    PublicDraft(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "draft-model:model={}",
        0.49e9,
        988e6,
        _APACHE,
        _family("Qwen", "Qwen2.5-Coder-{}-Instruct", "1.5B 3B 7B 14B 32B"),
    ),
    PublicDraft(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "draft-model:model={}",
        1.54e9,
        3.09e9,
        _APACHE,
        _family("Qwen", "Qwen2.5-Coder-{}-Instruct", "7B 14B 32B"),
    ),
    PublicDraft(
        "Qwen/Qwen3-0.6B",
        "draft-model:model={}",
        0.6e9,
        1.5e9,
        _APACHE,
        _family("Qwen", "Qwen3-{}", "1.7B 4B 8B 14B 32B"),
    ),
    PublicDraft(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "draft-model:model={}",
        0.135e9,
        0.27e9,
        _APACHE,
        _family("HuggingFaceTB", "SmolLM2-{}-Instruct", "360M 1.7B"),
    ),
    PublicDraft(
        "meta-llama/Llama-3.2-1B-Instruct",
        "draft-model:model={}",
        1.24e9,
        2.47e9,
        "llama3.2",
        (
            "meta-llama/Llama-3.2-3B-Instruct",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Llama-3.1-70B-Instruct",
            "meta-llama/Llama-3.3-70B-Instruct",
        ),
    ),
    PublicDraft(
        "yuhuili/EAGLE-LLaMA3-Instruct-70B",
        "eagle:model={}",
        2.04e9,
        4.08e9,
        _APACHE,
        ("meta-llama/Meta-Llama-3-70B-Instruct",),
    ),
)


def public_drafts(target: str) -> list[PublicDraft]:
    """Return the drafts of a target, by the last part of its name: a copy of another owner, or a GGUF file of it, is
    found too."""
    plain_target = _plain(target)
    return [each for each in PUBLIC_DRAFTS if any(_plain(name) in plain_target for name in each.targets)]


def _plain(name: str) -> str:
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().replace("meta-", "")
    for ending in _GGUF:
        last = last.removesuffix(ending)
    return last
