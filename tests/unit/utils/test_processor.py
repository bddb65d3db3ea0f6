"""What Linux tells of a processor, on x86 and on ARM; and where it tells nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.utils import machine as processor

X86 = "processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nflags\t\t: fpu avx2 avx\n\nprocessor\t: 1\nmodel name\t: Other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU architecture: 8\n"


@pytest.fixture(autouse=True)
def unread() -> Iterator[None]:
    """What was read of this machine is forgotten, before and after."""
    processor._facts.cache_clear()
    yield
    processor._facts.cache_clear()


@pytest.mark.parametrize(
    ("text", "model", "features"),
    [(X86, "Some CPU: 2 GHz", ("avx", "avx2", "fpu")), (ARM, None, ("asimd", "fp")), (None, None, ())],
)
def test_what_the_system_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, model: str | None, features: tuple[str, ...]
) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(processor, "_CPUINFO", file)
    assert processor.features() == features
    assert processor.model() == model if model else processor.model()
