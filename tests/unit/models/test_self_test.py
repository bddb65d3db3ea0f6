"""The self-test: what it finds, what it remembers, and when it stops."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import NewGELUActivation

from families import make_family
from forerun.config import COST_CACHE_VARIABLE
from forerun.kernels.cpu import native
from forerun.models import Model, Rows, load_model, self_test
from forerun.models.fused.native import NativeDecoder
from forerun.utils import files
from forerun.utils.home import HOME_VARIABLE
from kernel_cases import threads, using

REMEMBERED = "; remembered from an earlier load"
needs_kernels = pytest.mark.skipif(native() is None, reason="there are no native kernels here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("llama", tmp_path_factory.mktemp("self-test"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of passed self-tests."""
    native()  # loaded from the folder of before
    monkeypatch.setenv(COST_CACHE_VARIABLE, "1")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    monkeypatch.setattr(files, "_warned", set())
    return tmp_path / "home" / "self-tests-1.json"


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each forward of the self-test."""
    found: list[int] = []
    compute = self_test._SelfTest._logits

    def counted(test: Any, batch: list[Rows]) -> Tensor:
        found.append(sum(len(rows.token_ids) for rows in batch))
        return compute(test, batch)

    monkeypatch.setattr(self_test._SelfTest, "_logits", counted)
    return found


def loaded(folder: Path, dtype: str = "bfloat16", **options: Any) -> str:
    """What is tried of an exact model."""
    exactness = load_model(folder, dtype, **options).exactness
    assert exactness.exact, exactness.reason
    return exactness.tried


def num_kept(home: Path) -> int:
    return len(json.loads(home.read_text())["entries"])


def spoil(x: Tensor, row: int) -> Tensor:
    x[row:] += 1e-3
    return x


@needs_kernels
@pytest.mark.parametrize("row", [1, 8, 20])
@pytest.mark.parametrize("function", ["forward_layers", "head"])
def test_a_broken_native_kernel_is_found_and_not_remembered(
    function: str, row: int, folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows from this place in a forward on are others than alone."""
    compute = getattr(NativeDecoder, function)
    monkeypatch.setattr(NativeDecoder, function, lambda *given: spoil(compute(*given), row))
    for _ in range(2):
        exactness = load_model(folder).exactness
        assert not exactness.exact and "the fused decoder in torch.bfloat16" in str(exactness.reason)
    assert not home.exists()
    monkeypatch.undo()
    assert REMEMBERED not in loaded(folder)


def test_a_broken_module_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = NewGELUActivation.forward
    monkeypatch.setattr(NewGELUActivation, "forward", lambda *given: compute(*given) + 1e-3 * (given[1].shape[-2] > 8))
    exactness = load_model(make_family("codegen", tmp_path), "float32").exactness
    assert not exactness.exact
    assert "transformer.h.0.mlp.act (NewGELUActivation)" in str(exactness.reason)


@needs_kernels
def test_the_last_outputs_are_those_of_the_whole_layer(folder: Path) -> None:
    for quantize in (None, "int8", "int4"):
        model = load_model(folder, "float32", quantize=quantize)
        assert isinstance(model.decoder, NativeDecoder)
        part = model.decoder.first_part(40)
        assert part.num_outputs == 48 and part.num_layers == 2
        logits = self_test._model_of(model, part).forward([Rows(part.planner.new_cache(), [1, 2, 3])]).logits
        assert torch.equal(logits, model.forward([Rows(model.new_cache(), [1, 2, 3])]).logits[:, -48:])


@needs_kernels
def test_what_has_passed_is_not_tried_again(folder: Path, home: Path, forwards: list[int]) -> None:
    first = loaded(folder)
    assert sum(forwards) and first.startswith(f"2 of 2 layers and 96 of 96 outputs, {sum(forwards)} rows in ")
    forwards.clear()
    assert loaded(folder) == first + REMEMBERED
    assert not forwards and num_kept(home) == 1
    home.write_text("{")
    assert REMEMBERED not in loaded(folder) and num_kept(home) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(COST_CACHE_VARIABLE, "0")
        assert REMEMBERED not in loaded(folder)


@needs_kernels
def test_other_kernels_shapes_formats_and_threads_are_tried_anew(
    folder: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = native()
    assert library is not None
    loaded(folder)
    assert REMEMBERED not in loaded(folder, "float32")
    assert REMEMBERED not in loaded(folder, quantize="int4")
    assert REMEMBERED not in loaded(folder, quantize="int4-a16")
    assert REMEMBERED not in loaded(make_family("qwen3", tmp_path))
    with threads(torch.get_num_threads() + 1):
        assert REMEMBERED not in loaded(folder)
    with using("portable"):
        assert REMEMBERED not in loaded(folder)
    build = tmp_path / "build"
    build.write_bytes(library.path.read_bytes() + b"another")
    with monkeypatch.context() as patch:
        patch.setattr(library, "path", build)
        assert REMEMBERED not in loaded(folder)
    monkeypatch.setattr("forerun.utils.machine.model", lambda: "another processor")
    assert REMEMBERED not in loaded(folder)
    assert num_kept(home) == 9


def test_transformers_modules_are_tried_each_time(folder: Path, home: Path) -> None:
    for _ in range(2):
        assert REMEMBERED not in loaded(folder, "float32", kind="general")
    assert not home.exists()


@needs_kernels
def test_when_the_time_is_over_later_loads_go_on(
    folder: Path, home: Path, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count()
    monkeypatch.setattr(self_test.time, "thread_time", lambda: float(next(clock)))
    for number in range(1, 7):
        assert loaded(folder).endswith(f"; the time was over after {number} of 7 trials")
        assert len(forwards) <= 4
        forwards.clear()
    assert "over" not in (last := loaded(folder))
    assert loaded(folder) == last + REMEMBERED


@pytest.mark.parametrize(("tick", "trials"), [(3.0, 1), (0.9, 3), (0.3, 7)])
def test_the_time_of_transformers_modules(
    tick: float, trials: int, tmp_path: Path, forwards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(self_test.time, "thread_time", lambda: tick * next(ticks))
    tried = loaded(make_family("codegen", tmp_path), "float32")
    assert f"; the time was over after {trials} of " in tried and len(forwards) <= 1 + 3 * trials


def test_a_step_that_is_not_finite_is_told_whatever_is_remembered(folder: Path, home: Path) -> None:
    model: Model = load_model(folder)
    assert self_test.self_test(model).exact
    assert "not finite" in str(self_test.self_test(model, is_finite=False).reason)
