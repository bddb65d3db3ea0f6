from __future__ import annotations

from pathlib import Path

from forerun.train.corpus import (
    SourceFile,
    hash_fraction,
    is_data_table,
    is_generated,
    is_held_out,
    read_python_files,
    split,
)


def test_the_split_covers_everything_and_never_overlaps() -> None:
    files = [SourceFile(f"folder/module_{index}.py", f"x = {index}\n") for index in range(2_000)]
    training, held_out = split(files)
    assert {file.name for file in training}.isdisjoint(file.name for file in held_out)
    assert sorted(training + held_out, key=lambda file: file.name) == sorted(files, key=lambda file: file.name)
    assert 0.03 < len(held_out) / len(files) < 0.07


def test_the_split_is_pinned() -> None:
    """Values that no refactoring may change: the bundled models were trained under this split."""
    assert hash_fraction("os.py") == 0.850948727781281
    assert is_held_out("traceback.py") and is_held_out("secrets.py")
    assert not is_held_out("os.py") and not is_held_out("json/decoder.py")


def test_the_side_of_a_file_does_not_depend_on_other_files() -> None:
    alone = split([SourceFile("traceback.py", "pass\n")])[1]
    beside = split([SourceFile("traceback.py", "pass\n"), SourceFile("os.py", "import sys\n")])[1]
    assert [file.name for file in alone] == [file.name for file in beside] == ["traceback.py"]


def test_unwanted_files_are_left_out(tmp_path: Path) -> None:
    text = "def function():\n    return 'long enough to be kept'\n"
    (tmp_path / "kept.py").write_text(text)
    (tmp_path / "twin_of_kept.py").write_text(text)
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9\xe8' # long enough to be read at all\n")
    (tmp_path / "table.py").write_text("TABLE = [\n" + "    0, 17, 255, 4711, 12, 99,\n" * 400 + "]\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("# third party\n" + text)
    assert [file.name for file in read_python_files(tmp_path)] == ["kept.py"]


def test_tables_and_generated_files_are_recognised() -> None:
    assert is_data_table('X = "\\x00\\x01"\n' * 500)
    assert not is_data_table("def function(first, second):\n    return first + second\n" * 200)
    assert is_generated('"""Codec, generated from a mapping with gencodec.py."""\n')
    assert not is_generated("class Generator:\n    pass\n")
