"""Every option of a described family is read, or refused: none silently changes what Transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from families import DESCRIBED, SCANNED, VOCAB, tiny_config, tiny_model
from forerun.models import Rows, load_model
from forerun.models.families.table import refusal

_OF_ALL = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
_OF_TRAINING = {
    "initializer_range",
    "use_cache",
    "output_router_logits",
    "init_std",
    "layerdrop",
    "reorder_and_upcast_attn",
}
_OTHER_NUMBERS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "clip_qkv": 0.5, "sliding_window": 24}


def others(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option with another value than it has."""
    for name, value in config.to_dict().items():
        if name in _OF_ALL | _OF_TRAINING or "drop" in name:
            continue
        if isinstance(value, bool):
            yield name, not value
        elif isinstance(value, float):
            yield name, value * (1.3 if value < 0.5 else 0.7)
        elif value is None and name in _OTHER_NUMBERS:
            yield name, _OTHER_NUMBERS[name]
        elif name in ("hidden_act", "hidden_activation", "activation_function", "activation"):
            yield name, "relu" if value == "gelu" else "gelu"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", DESCRIBED)
def test_options_are_read_or_refused(family: str, tmp_path: Path) -> None:
    text = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(1))
    for name, value in others(tiny_config(family)):
        if refusal(tiny_config(family, **{name: value})):
            continue
        reference = tiny_model(family, **{name: value})
        reference.set_attn_implementation("eager")
        reference.save_pretrained(tmp_path / name)
        with torch.inference_mode():
            expected = reference.double()(text[None]).logits[0]
        model = load_model(tmp_path / name, "float64", kind="fused")
        found = model.forward([Rows(model.new_cache(), text.tolist())]).logits
        assert float((found - expected).abs().max()) < (1e-4 if family in SCANNED else 1e-5), f"{name}={value!r}"
