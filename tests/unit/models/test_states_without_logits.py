"""Hidden states of rows without logits, and the rows of embedding and output layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from families import VOCAB, make_family
from forerun.kernels.quantize import quantize_int4, quantize_int8
from forerun.kernels.torch.linear import JoinedLinear
from forerun.models import Rows, load_model, load_transformers_model

LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: make_family(name, root) for name in ("qwen3", "gpt2")}


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("gpt2", "bfloat16")])
def test_states_do_not_need_logits(family: str, dtype: str, folders: dict[str, Path]) -> None:
    """Compare bits with and without logits, of the requested last rows of each sequence."""
    model = load_model(folders[family], dtype=dtype)
    first, second = list(range(1, 20)), list(range(40, 47))
    whole = model.forward([Rows(model.new_cache(), first), Rows(model.new_cache(), second)], LAYERS)
    assert whole.hidden_outputs is not None
    batch = [
        Rows(model.new_cache(), first, num_logits=0, num_hidden_outputs=12),
        Rows(model.new_cache(), second, num_logits=2),
    ]
    some = model.forward(batch, LAYERS)
    assert some.hidden_outputs is not None
    assert torch.equal(some.hidden_outputs, torch.cat([whole.hidden_outputs[7:19], whole.hidden_outputs[-2:]]))
    assert torch.equal(some.logits, whole.logits[-2:])
    none = model.forward([Rows(model.new_cache(), first, num_logits=0, num_hidden_outputs=19)], LAYERS)
    assert none.hidden_outputs is not None
    assert len(none.logits) == 0 and torch.equal(none.hidden_outputs, whole.hidden_outputs[:19])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"dtype": "float64"}),
        ("qwen3", {"dtype": "float32"}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("gpt2", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16", "quantize": "int8"}),
        ("qwen3", {"dtype": "float32", "quantize": "int4"}),
    ],
)
def test_rows_of_the_embedding_and_the_output_layer(
    family: str, options: dict[str, str], folders: dict[str, Path]
) -> None:
    model = load_model(folders[family], **options)  # type: ignore[arg-type]
    plain = load_transformers_model(folders[family], options["dtype"])
    ids = torch.tensor([3, 0, VOCAB - 1, 3])
    tolerance = 0.02 if "quantize" in options else 0.0
    for rows, module in (
        (model.embedding_rows(ids), plain.get_input_embeddings()),
        (model.output_rows(ids), plain.get_output_embeddings()),
    ):
        expected = module.weight.detach()[ids].float()
        assert rows.dtype == torch.float32 and rows.shape == expected.shape
        assert (rows - expected).abs().max() <= tolerance * expected.abs().max()


def test_rows_of_weights_in_different_codes() -> None:
    weights = torch.randn(5, 32), torch.randn(3, 32)
    parts = [quantize_int8(weights[0], "a"), quantize_int4(weights[1], "b")]
    every = torch.cat([part.dequantize(torch.float32) for part in parts])
    index = torch.tensor([6, 0, 5, 4])
    assert torch.equal(JoinedLinear(parts).rows(index), every[index])
