"""Block heads that read tokens, and begin as an EAGLE head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forerun.config import ASSETS, BUNDLED_TARGET
from forerun.drafters.models.head_files.folder import load_head
from forerun.errors import ConfigError
from forerun.models import Model, load_model
from forerun.train.block import BlockKind
from forerun.train.heads.options import BlockShape, BlockTraining

GATE = "midlayer.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def target() -> Model:
    return load_model("bundled")


def test_a_head_that_reads_tokens_begins_as_an_eagle_head(target: Model) -> None:
    """As the one that is shipped, with the channels of the largest weights where fewer are asked for."""
    eagle = load_head(ASSETS / "heads" / "eagle" / "bundled")
    for width in (704, 40):
        shape = BlockShape(block_size=3, context_tokens=True, intermediate_size=width, markov_rank=2, draft_vocab=200)
        kind = BlockKind(BlockTraining(shape=shape, start=str(ASSETS / "heads" / "eagle" / "bundled")))
        config = kind.config(BUNDLED_TARGET, target, 48)
        head = kind.module(config)
        kind.set_first_weights(head, torch.randn(9, 256), torch.randn(200, 256))
        found = {name: parameter.detach() for name, parameter in head.named_parameters()}
        own = {name for name in found if name.startswith(("slot_", "markov_head"))}
        assert len(own) == 4 and found.keys() - own == eagle.tensors.keys()
        for name, tensor in eagle.tensors.items():
            if ".mlp." not in name or width == 704:
                assert torch.equal(found[name], tensor), name
        assert torch.count_nonzero(found["slot_states.weight"][0]) == 0
    gate, up, down = (eagle.tensors[f"midlayer.mlp.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    kept = [channel for channel in range(704) if any(torch.equal(gate[channel], row) for row in found[GATE])]
    sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    assert sorted(sizes.topk(40).indices.tolist()) == kept
    assert torch.equal(down[:, kept], found["midlayer.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("shape", "folder", "said"),
    [
        ({"intermediate_size": 705}, "eagle", "has intermediate_size 704, but the one to be trained 705"),
        ({"layers": "2,8"}, "eagle", r"has layers \(2, 8, 14, 16\), but the one to be trained \(2, 8\)"),
        ({}, "medusa", "a head of the kind"),
    ],
)
def test_a_head_that_is_no_such_start_is_refused(shape: dict[str, Any], folder: str, said: str, target: Model) -> None:
    options = BlockTraining(
        shape=BlockShape(context_tokens=True, **shape), start=str(ASSETS / "heads" / folder / "bundled")
    )
    with pytest.raises(ConfigError, match=said):
        BlockKind(options).config(BUNDLED_TARGET, target, 48)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_layers": 2}, "this has 2 layers"),
        ({"sample_from_anchor": True}, "a slot for the last token"),
        ({"mask_token": 3}, "a token for the mask"),
    ],
)
def test_what_a_head_that_reads_tokens_has_not_is_refused(changed: dict[str, Any], said: str, target: Model) -> None:
    with pytest.raises(ConfigError, match=said):
        BlockKind(BlockTraining(shape=BlockShape(context_tokens=True, **changed))).config("bundled", target, 48)
