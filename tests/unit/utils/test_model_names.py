"""What requests may call a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.utils.model_names import names_of, served_name, short_name


@pytest.mark.parametrize(
    ("model", "short"),
    [
        ("/models/it-q4.gguf", "it-q4"),
        ("models/it/", "it"),
        ("owner/it", "it"),
        ("owner/it:it-q4.gguf", "it-q4"),
        (r"C:\models\it.gguf", "it"),
        ("bundled", "bundled"),
        ("/", "/"),
    ],
)
def test_short_names(model: str, short: str) -> None:
    assert short_name(model) == short


def test_no_path_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it.gguf").touch()
    assert served_name(str(tmp_path / "it.gguf")) == "it"
    for no_path in ("owner/it", "x" * 300, "\0"):
        assert served_name(no_path) == no_path
    monkeypatch.chdir(tmp_path)
    assert served_name(".") == tmp_path.name


def test_all_names_are_known(tmp_path: Path) -> None:
    path = str(tmp_path / "it.gguf")
    assert names_of("mine", path) == {"mine", path, "it", "it.gguf"}
