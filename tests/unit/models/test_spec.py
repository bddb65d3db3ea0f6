"""The spec of a model is made once, when the model is read, and handed on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families import make_family
from forerun.models import load_model
from forerun.models.families.table import FAMILIES
from forerun.models.memory_plan import model_memory
from gguf_files import write_gguf
from gguf_models import tiny


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what grows by a model type each time that a spec is made."""
    found: list[str] = []

    def counted(name: str) -> Any:
        make = FAMILIES[name]

        def family(config: Any) -> Any:
            found.append(name)
            return make(config)

        return family

    for name in ("llama", "qwen3_moe"):
        monkeypatch.setitem(FAMILIES, name, counted(name))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("quantize", [None, "int8", "none"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_load_makes_the_spec_once(family: str, quantize: str | None, tmp_path: Path, made: list[str]) -> None:
    folder = make_family(family, tmp_path)
    write_gguf(tmp_path / "it.gguf", tiny(family), "Q8_0")
    for path in (folder, tmp_path / "it.gguf"):
        for kind in ("auto", "general") if quantize is None else ("auto",):
            made.clear()
            load_model(path, "float32", kind=kind, quantize=quantize)  # type: ignore[arg-type]
            assert made == [family], (path, kind)
        made.clear()
        model_memory(path, "float32", quantize=quantize)
        assert made == [family]
