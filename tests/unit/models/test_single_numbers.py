"""Functions of single numbers have the same bits wherever a number lies, in every family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from families import FAMILIES, ONLY_FUSED, VOCAB, make_family
from forerun.kernels.torch import elementwise
from forerun.kernels.torch.elementwise import SameAtEveryPlace
from forerun.models import Model, Rows, load_model

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    **{name: ACT2FN[name] for name in ACT2FN if name not in ("prelu", "xielu")},
    "sigmoid()": Tensor.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu, in place": lambda x: F.silu(x.clone(), inplace=True),
    "mish, in place": lambda x: F.mish(x.clone(), inplace=True),
    "softplus of 3": lambda x: F.softplus(x, 3.0, threshold=5),
    "elu": F.elu,
    "glu": lambda x: F.glu(torch.cat([x, x.flip(-1)], -1)),
    "out": lambda x: torch.sigmoid(x, out=torch.empty_like(x)),
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_bits_that_they_have_alone(name: str, dtype: torch.dtype) -> None:
    function, generator = FUNCTIONS[name], torch.Generator().manual_seed(1)
    x = (torch.randn(80, 1021, generator=generator) * 4).to(dtype)
    x[0, :6] = torch.tensor([0.0, -0.0, 90.0, -90.0, float("inf"), 1e-30], dtype=dtype)
    with SameAtEveryPlace():
        together = function(x)
        alone = torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))])
    assert torch.equal(together, alone)
    theirs = function(x)
    theirs[x == float("inf")] = together[x == float("inf")]  # PyTorch's gelu of it is NaN with AVX-512
    torch.testing.assert_close(together, theirs)


def exact_at(model: Model, num_threads: int) -> bool:
    """Whether rows of six sequences computed alone, in groups and all at once have the same bits."""
    before, generator = torch.get_num_threads(), torch.Generator().manual_seed(5)
    lengths = (37, 211, 333, 150, 8, 291)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    torch.set_num_threads(num_threads)
    try:
        together = model.forward([Rows(model.new_cache(), tokens) for tokens in sequences]).logits
        whole = [model.forward([Rows(model.new_cache(), tokens)]).logits for tokens in sequences]
        first = []
        for tokens in sequences:
            cache = model.new_cache()
            for token_id in tokens[:8]:
                first.append(model.forward([Rows(cache, [token_id])]).logits)
                cache.commit([0])
    finally:
        torch.set_num_threads(before)
    begun = torch.cat([rows[:8] for rows in together.split(lengths)])
    return torch.equal(together, torch.cat(whole)) and torch.equal(begun, torch.cat(first))


ODD = [
    pytest.param(family, width, marks=() if (family, width) == ("gemma2", 128) else pytest.mark.slow)
    for family in ("gemma", "gemma2", "gemma3_text", "starcoder2", "gpt_bigcode", "qwen2_moe", "phi3")
    for width in (128, 105)
]


@pytest.mark.parametrize(("family", "width"), ODD)
def test_rows_of_a_family_at_one_thread_and_three(family: str, width: int, tmp_path: Path) -> None:
    more = {"n_inner": width} if family == "gpt_bigcode" else {"intermediate_size": width}
    model = load_model(make_family(family, tmp_path, **more), "float32", kind="general")
    assert model.exactness.exact, model.exactness.reason
    assert exact_at(model, 1) and exact_at(model, 3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ONLY_FUSED])
def test_rows_of_every_family_at_one_thread_and_three(family: str, dtype: str, tmp_path: Path) -> None:
    model = load_model(make_family(family, tmp_path), dtype, kind="general")
    if model.exactness.exact or family != "gpt_oss":  # whose experts Transformers computes for all tokens at once
        assert exact_at(model, 1) and exact_at(model, 3)


@pytest.mark.usefixtures("reference_kernels")  # whether one of eight numbers differs hangs on their values
def test_the_self_test_sees_what_depends_on_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "_OURS", {})
    exactness = load_model(make_family("gemma2", tmp_path), "float32", kind="general").exactness
    assert not exactness.exact
    assert "mlp.act_fn (GELUTanh)" in str(exactness.reason)
