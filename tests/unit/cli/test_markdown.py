"""Markdown that is drawn while it grows: what stands on the screen at the end, and how much is drawn again."""

from __future__ import annotations

import re

import pytest

from forerun.cli.chat.screen import MarkdownStream

TEXTS = {
    "prose": "# Title\n\nA *long* paragraph of many words that runs over more than one line, surely.\nAnd on.\n",
    "lists": "Steps:\n\n1. one\n2. two\n   - nested `code`\n\n> quoted\n> more\n\n***\n",
    "code": "See:\n\n```python\ndef f(x):\n    return [x]  # much\n\n\nprint(f(1))\n```\n\nDone.\n",
    "table": "| a | b |\n|---|---|\n| 1 | 2 |\n| long words here | 4 |\n\nafter",
    "html": "a <b>bold</b> <div>\n\n<script>x</script>\n\n<think>hm</think>",
    "setext": "A heading\n=========\n\ntext\n---\nlast",
    "open": "```\nno end",
    "empty": "",
}


class Paper:
    """A terminal that knows the two sequences which move the cursor back."""

    def __init__(self) -> None:
        self.lines = [""]
        self.num_erased = 0

    def write(self, text: str) -> None:
        for back, plain in re.findall(r"\x1b\[(\d+)F\x1b\[J|([^\x1b]+|\x1b\[[\d;]*m)", text):
            if back:
                self.num_erased += int(back)
                del self.lines[-1 - int(back) :]
                self.lines.append("")
            elif not plain.startswith("\x1b"):
                first, *more = plain.split("\n")
                self.lines[-1] += first
                self.lines += more


def drawn(text: str, size: int, monkeypatch: pytest.MonkeyPatch, lines: int = 40) -> Paper:
    monkeypatch.setenv("COLUMNS", "41")
    monkeypatch.setenv("LINES", str(lines))
    paper = Paper()
    stream = MarkdownStream(paper.write)
    for start in range(0, len(text), size):
        stream._next = 0.0
        stream.push(text[start : start + size])
    stream.finish()
    return paper


@pytest.mark.parametrize("name", TEXTS)
def test_the_screen_is_the_same_however_the_text_comes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drawn(TEXTS[name], len(TEXTS[name]) or 1, monkeypatch).lines
    for size in (1, 3, 17):
        assert drawn(TEXTS[name], size, monkeypatch).lines == whole
    assert max(map(len, whole)) <= 40


def test_html_is_text_and_marks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [line.strip() for line in drawn(TEXTS["html"], 5, monkeypatch).lines if line] == [
        "a <b>bold</b> <div>",
        "<script>x</script>",
        "<think>hm</think>",
    ]
    assert "**" not in "".join(drawn("some **bold** words", 2, monkeypatch).lines)


def test_a_long_answer_draws_little_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left the screen is out of reach, and a line that is done is not drawn again."""
    text = "```\n" + "".join(f"line {number}\n" for number in range(200)) + "```\n"
    paper = drawn(text, 7, monkeypatch, lines=10)
    assert [line.strip() for line in paper.lines if line.strip()] == [f"line {number}" for number in range(200)]
    assert paper.num_erased < 3 * len(text) / 7
