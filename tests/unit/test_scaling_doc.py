"""docs/scaling.md: what it says of other systems was tried, by a command and with versions, or says "not run here"."""

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "scaling.md"
OTHERS = re.compile(r"\b(vLLM|llama\.cpp|Transformers|Ray|TensorRT-LLM|SGLang)\b")
NOT_RUN = "not run here"
COLUMNS = ["row", "what", "versions", "command", "result"]
ROW = re.compile(r"\(([A-Z]\d(?:, [A-Z]\d)*)\)")
VERSION = re.compile(r"\d+\.\d+")


def blocks(text: str) -> list[str]:
    """Paragraphs, list items and rows of tables, without code and headings; words of code count for none."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    parts = re.split(r"\n\s*\n|\n(?=[-|#] ?)", text)
    return [part.strip() for part in parts if part.strip() and not part.strip().startswith("#")]


def tried(text: str) -> dict[str, dict[str, str]]:
    """The rows of the tables with the columns of what was tried, by their names."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not columns:
            columns = cells
        elif columns == COLUMNS and set("".join(cells)) - set("-: "):
            row = dict(zip(COLUMNS, cells, strict=True))
            assert row["row"] not in found, f"two rows are called {row['row']}"
            found[row["row"]] = row
    return found


def faults(text: str) -> list[str]:
    """What says something of another system and neither was tried nor says that it was not."""
    rows = tried(text)
    found = [
        f"row {name}: no version or no command"
        for name, row in rows.items()
        if NOT_RUN not in row["result"] and not (VERSION.search(row["versions"]) and "`" in row["command"])
    ]
    for block in blocks(text):
        prose = re.sub(r"`[^`]*`", "", block)
        if (
            not OTHERS.search(prose)
            or NOT_RUN in block
            or (block.startswith("|") and block.split("|")[1].strip() in rows)
        ):
            continue
        named = {name for found_in in ROW.findall(block) for name in found_in.split(", ")}
        if not named or not named <= rows.keys():
            found.append(block.splitlines()[0])
    return found


def test_every_claim_was_tried_or_says_that_it_was_not() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert faults(text) == []
    assert len(tried(text)) > 5


TABLE = "| row | what | versions | command | result |\n|---|---|---|---|---|\n| V1 | x | {} | {} | {} |\n"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (TABLE.format("vLLM 0.32", "`make`", "1.0"), 0),
        (TABLE.format("vLLM", "`make`", "1.0"), 1),
        (TABLE.format("vLLM 0.32", "", "1.0"), 1),
        (TABLE.format("", "", "not run here"), 0),
        ("vLLM is fast.", 1),
        ("vLLM is fast (V1).", 1),
        (TABLE.format("vLLM 0.32", "`make`", "1.0") + "\nvLLM is fast (V1).", 0),
        ("vLLM is fast; not run here.\n\nRay is slow.", 1),
        ("`vLLM` is a word.\n\n```sh\nvLLM\n```\n## vLLM\n", 0),
        ("- Ray is slow.\n- A laptop.", 1),
    ],
)
def test_the_reader_sees_faults(text: str, count: int) -> None:
    assert len(faults(text)) == count
