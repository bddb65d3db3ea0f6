"""What is planned of each product is what the decoder holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from families import make_family
from forerun.kernels.block_weight import BLOCK_TYPES
from forerun.kernels.cpu import native
from forerun.kernels.cpu.linear import NativeLinear, weight_layout
from forerun.kernels.quantize import MADE_FORMS
from forerun.models import load_model
from forerun.models.families.table import spec_of
from forerun.models.fused.native import NativeDecoder
from forerun.models.loading.fused_modules import empty_fused
from forerun.models.loading.source import find_source
from forerun.models.weight_plan import PlannedProduct, WeightPlan, roles_of_products
from gguf_files import write_gguf
from gguf_models import tiny

CPU = torch.device("cpu")
Q8, INT8, INT4 = BLOCK_TYPES["Q8_0"], MADE_FORMS[8], MADE_FORMS[4]


def planned(path: Path, dtype: str = "bfloat16", quantize: str | None = None) -> list[PlannedProduct]:
    source = find_source(path)
    config = source.plain_config()
    spec = spec_of(config)
    plan = WeightPlan.of(source, spec, dtype, CPU, quantize, is_fused=True)
    return plan.products(empty_fused(source.name, config, spec, plan.dtype), spec)


def check(path: Path, *numbers: str, **options: Any) -> list[PlannedProduct]:
    """Compare shapes, layouts and bytes. numbers: parts of the names of products that never are quantized."""
    products, decoder = planned(path, **options), load_model(path, **options).decoder
    assert isinstance(decoder, NativeDecoder)
    held = Counter(
        (each.out_features, each.in_features, int(each.kind), each.nbytes)
        for name, each in decoder._kept.items()
        if isinstance(each, NativeLinear) and not any(part in name for part in numbers)
    )
    expected = Counter[tuple[int, ...]]()
    for product in products:
        count = len(product.matrices)
        each = sum(product.outputs), product.inputs, int(weight_layout(product.kept[0])), product.nbytes // count
        expected[each] += count if product.nbytes else 0
    assert held == expected
    return products


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    if native() is None:
        pytest.skip("there are no native kernels here")


@pytest.mark.parametrize("options", [{}, {"quantize": "int4"}], ids=str)
@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("llama", ()),
        ("gpt2", ()),
        ("phi3", ()),
        ("gemma4_text", ("router",)),
        ("mixtral", (".gate.",)),
        ("qwen3_next", (".mlp.gate.", "shared_expert_gate")),
        ("falcon_h1", ()),
        ("deepseek_v3", (".mlp.gate.", "kv_b_proj")),
    ],
)
def test_families(family: str, numbers: tuple[str, ...], options: dict[str, str], tmp_path: Path) -> None:
    check(make_family(family, tmp_path), *numbers, **options)


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"quantize": "none"}], ids=str)
def test_a_file_of_several_types(options: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("llama"), lambda name: "Q4_0" if "v_proj" in name else "Q8_0")
    products = {product.matrices[0][0]: product for product in check(path, **options)}
    key, value = (products[f"model.layers.1.self_attn.{each}_proj.weight"] for each in "kv")
    if not options:
        assert key.kept == key.stored == (Q8,) and value.kept == value.stored == (BLOCK_TYPES["Q4_0"],)
    elif options["quantize"] == "none":
        assert key.stored == value.stored == (None,) and key.kept == value.kept == (torch.bfloat16,)
    else:
        assert value.kept == (INT8,) and key.kept == key.stored != (INT8,)


def test_the_bytes_of_a_product_of_several_parts() -> None:
    types = {"a": Q8, "b": Q8, "c": BLOCK_TYPES["Q4_0"]}
    plan = WeightPlan(torch.bfloat16, CPU, is_fused=True, library=native(), stored=types.get)
    alike, differing = (plan.product([names], [32, 16], 64) for names in ("ab", "ac"))
    assert alike.kept == (Q8, Q8) and alike.nbytes == plan.nbytes(Q8, (48, 64))
    assert differing.stored == (Q8, types["c"]) and differing.nbytes == 48 * 64 * 2
    experts = plan.product(["a", "b"], [32], 64, is_expert=True)
    assert experts.matrices == (("a",), ("b",)) and experts.nbytes == 2 * plan.nbytes(Q8, (32, 64))


def test_forms() -> None:
    library = native()
    stored = WeightPlan(torch.bfloat16, CPU, is_fused=True, library=library)
    assert stored.forms([Q8, Q8]) == [Q8, Q8]
    assert stored.forms([Q8, None]) == stored.forms([Q8, BLOCK_TYPES["Q4_K"]]) == [torch.bfloat16] * 2
    made = WeightPlan(torch.bfloat16, CPU, is_fused=True, library=library, quantize="int4")
    assert made.forms([INT8, None, INT4]) == [INT4] * 3
    assert made.forms([INT8, None, INT4], is_outer=True) == [INT8, INT8, INT4]
    assert [made.activation_bits(form) for form in (INT4, INT8)] == [8, 16]


@pytest.mark.parametrize(
    ("target", "is_quantized", "form"),
    [(None, False, torch.float32), (None, True, INT8), ("int8", False, INT8), ("Q4_K_M", True, INT4)],
)
def test_heads(target: str | None, is_quantized: bool, form: object) -> None:
    plan = WeightPlan.of_head(torch.float32, CPU, native(), target, is_quantized=is_quantized)
    assert plan.form("fc.weight") == form
    assert plan.target_rows == (INT8 if is_quantized else None)


def test_products_of_a_layer() -> None:
    roles = ["query", "key", "value", "out", "up", "down"]
    assert roles_of_products(roles, is_native=True) == [[role] for role in roles]
    assert roles_of_products(roles, is_native=False) == [roles[:3], ["out"], ["up"], ["down"]]
    in_proj = ["in_proj_qkv", "in_proj_k", "in_proj_v"]
    assert roles_of_products(in_proj, is_native=True) == roles_of_products(in_proj, is_native=False) == [in_proj]
