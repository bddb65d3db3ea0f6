"""Prompts of other kinds than code."""

from pathlib import Path

import pytest

from forerun.train.corpus import SourceFile, read_held_out
from forerun.utils.workloads import Case, load_workload, save_workload
from tools import prompts as workload_prompts

PROSE = '''def wait(events):
    """Wait for the events.

    {}
    """
    return events
'''


def prose_file(words: int, name: str = "a.py") -> SourceFile:
    line = "the quick brown fox jumps over the lazy dog and then sleeps"
    return SourceFile(name, PROSE.format("\n    ".join([line] * (words // 12))))


def test_prose_prompts_end_inside_a_long_docstring() -> None:
    (prompt,) = workload_prompts.prose_prompts([prose_file(120)])
    assert prompt.prompt.startswith("def wait")
    assert prompt.prompt.count('"""') == 1
    assert prompt.prompt + prompt.reference in prose_file(120).text
    assert prompt.reference.rstrip().endswith('"""')
    assert not prompt.prompt.endswith("\n") and prompt.reference.startswith("\n")


@pytest.mark.parametrize("text", ["x = 1\n", "def broken(:\n", PROSE.format(">>> wait([])\n" + "words " * 200)])
def test_files_without_prose_give_none(text: str) -> None:
    assert workload_prompts.prose_prompts([SourceFile("b.py", text), prose_file(24, "c.py")]) == []


def test_copying_prompts_hold_the_span_and_the_beginning_of_its_copy() -> None:
    lines = [f"value_{i} = compute({i}, {i * i})" for i in range(200)]
    files = [SourceFile(f"{name}.py", "\n".join(lines)) for name in "abcdef"]
    prompts = workload_prompts.copying_prompts(files)
    assert len(prompts) == 6
    for prompt in prompts:
        span, shown = prompt.prompt.split("\n\n")
        span_lines, copied = span.split("\n"), [*shown.rstrip("\n").split("\n"), *prompt.reference[1:].split("\n")]
        assert 20 <= len(span_lines) <= 32
        assert abs(len(copied) - len(span_lines)) <= 2
        assert len({*copied} & {*span_lines}) >= len(span_lines) // 3
    assert all(prompt.reference.startswith("\n") for prompt in prompts)
    assert any(prompt.reference in "\n".join(lines) for prompt in prompts)  # some are copied unchanged


def test_high_temperature_is_written_and_read(tmp_path: Path) -> None:
    prompts = workload_prompts.high_temperature_prompts([Case("a.py", "def f():\n", "    pass\n")])
    save_workload(prompts, tmp_path / "hot.jsonl")
    (case,) = load_workload(str(tmp_path / "hot.jsonl"))
    assert (case.name, case.prompt, case.temperature) == ("a.py", "def f():\n", workload_prompts.HIGH_TEMPERATURE)


@pytest.mark.parametrize("name", ["prose", "copying", "high-temperature"])
def test_the_bundled_ones_are_what_the_functions_give(name: str, tmp_path: Path) -> None:
    files = read_held_out()
    made = {
        "prose": lambda: workload_prompts.prose_prompts(files),
        "copying": lambda: workload_prompts.copying_prompts(files),
        "high-temperature": lambda: workload_prompts.high_temperature_prompts(load_workload("code")),
    }[name]()
    save_workload(made, tmp_path / "made.jsonl")
    assert made == load_workload(name) == load_workload(str(tmp_path / "made.jsonl"))
    assert len(made) >= 15
