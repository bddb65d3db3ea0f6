"""Models of a given shape with random weights: what the file holds, and what a forward of them reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.kernels.cpu import native
from forerun.lab.bench import random_model
from forerun.lab.bench.forward import time_forwards
from forerun.lab.bench.random_model import Shape, opened
from forerun.models import Rows, find_tokenizer, load_model
from forerun.models.loading.gguf.file import GgufFile
from forerun.models.model import Model

PUBLISHED = dict(random_model.SHAPES)
TIED, UNTIED, MIXED = (
    Shape("qwen3", 256, 2, 4, 2, 64, 320, 512),
    Shape("llama", 96, 1, 3, 1, 32, 64, 300, is_tied=False),
    Shape("llama", 256, 8, 4, 2, 64, 512, 512),
)


@pytest.fixture(autouse=True)
def shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "SHAPES", {"tied": TIED, "untied": UNTIED, "mixed": MIXED})


@pytest.mark.parametrize(
    ("name", "number_format", "types"),
    [
        ("tied", "int4", ("Q4_0", "Q6_K", None)),
        ("untied", "int4-a16", ("Q4_0", "Q4_0", "Q8_0")),  # 96 numbers are no whole block of Q6_K
        ("tied", "int8", ("Q8_0", "Q8_0", None)),
        ("untied", "bfloat16", ("BF16", "BF16", "BF16")),
        ("untied", "float32", ("BF16", "BF16", "BF16")),
        ("mixed", "Q4_K_M", ("Q6_K", "Q6_K", None)),
    ],
)
def test_the_file_has_the_wanted_bits(name: str, number_format: str, types: tuple[str | None, ...]) -> None:
    with opened(f"random:{name}", number_format) as path:
        tensors = GgufFile.open(path).tensors
        names = ("blk.0.ffn_down.weight", "token_embd.weight", "output.weight")
        assert tuple(tensors[each].type_name if each in tensors else None for each in names) == types
        for tensor in (tensors[each] for each in names if each in tensors):
            numbers = tensor.dequantize(torch.float32)
            assert abs(numbers.mean()) < 0.002 and 0.015 < numbers.std() < 0.025
        tokenizer = find_tokenizer(path)
        assert len(tokenizer("ab é 12")["input_ids"]) == 8 and tokenizer.decode(tokenizer("é ")["input_ids"]) == "é "
        model = load_model(path, quantize=number_format if number_format.startswith("int") else None)
        logits = model.forward([Rows(model.new_cache(), [1, 2, 3])]).logits
        assert model.exactness.exact and logits.isfinite().all() and 0.01 < logits.std() < 10
    assert not Path(path).exists()


def test_a_forward_reads_all_weights_with_their_scales() -> None:
    if native() is None:
        pytest.skip("the native kernels are not available")
    (one, two) = time_forwards("random:tied", ["int4"], [1, 2], 9, rounds=1)
    assert (one.method, one.rows, two.rows, one.nbytes) == ("fused", 1, 2, two.nbytes)
    layer = 256 * 256 + 2 * 128 * 256 + 256 * 256 + 3 * 256 * 320
    norms = 2 * (2 * 256 + 2 * 64) + 256
    assert one.nbytes == 2 * layer * 18 / 32 + 512 * (256 + 4) + norms * 4  # Q4_0, 8 bits by output channel, float32
    (row,) = time_forwards("random:untied", ["bfloat16"], [1], 9, rounds=1)
    weights = 2 * 96 * 96 + 2 * 32 * 96 + 3 * 96 * 64
    assert row.nbytes == 2 * (weights + 304 * 96) + 4 * 3 * 96  # the output layer's blocks are whole; no embedding


def test_a_prompt_has_one_row_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int | None]] = []
    forward = Model.forward

    def noted(self: Model, rows: list[Rows]) -> object:
        asked.extend((len(each.token_ids), each.num_logits) for each in rows)
        return forward(self, rows)

    monkeypatch.setattr(Model, "forward", noted)
    time_forwards("random:untied", ["bfloat16"], [64, 65], 9, rounds=1)
    assert (64, 64) in asked and (65, 1) in asked and not {(65, None), (65, 65)} & set(asked)


def test_other_names_stay_and_unknown_shapes_are_refused() -> None:
    with opened("owner/random:x", "int4") as name:
        assert name == "owner/random:x"
    with pytest.raises(ConfigError, match="tied, untied, mixed"), opened("random:nothing", "int4"):
        pass


def test_published_shapes_have_their_sizes() -> None:
    def parameters(shape: Shape) -> int:
        return sum(torch.Size(size).numel() for _, size, _ in random_model._tensors(shape, "Q4_0", "Q6_K"))

    known = {"smollm2-135m": 134_515_008, "llama-1b": 1_235_814_400, "llama-8b": 8_030_261_248}
    known |= {"qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096}
    assert {name: parameters(PUBLISHED[name]) for name in known} == known
