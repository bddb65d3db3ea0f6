"""Documents agree with the code: folders, modules and functions, links, commands and figures."""

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from drawings import DRAWINGS, IMAGES, STAGES
from families import DESCRIBED
from forerun.cli.main import app
from forerun.lab.bench.report.headline import put_into, sections
from forerun.lab.results.files import load_results

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "forerun"


STRUCTURE = ROOT / "docs" / "structure.md"


def test_structure_names_every_folder() -> None:
    named = set(re.findall(r"`([\w/]+)/`", STRUCTURE.read_text(encoding="utf-8")))
    folders = {path.parent.relative_to(SRC).as_posix() for path in SRC.rglob("*.py")} - {"."}
    assert folders - named == set()
    assert [name for name in sorted(named) if not (SRC / name).is_dir() and not (ROOT / name).is_dir()] == []


def test_modules_and_functions_of_structure_exist() -> None:
    """`path.py` must be a module, below src/forerun or the root; in `path.py:name`, name must be defined there."""
    found = re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", STRUCTURE.read_text(encoding="utf-8"))
    assert len(found) > 100
    missing = []
    for path, name in found:
        file = next((root / path for root in (SRC, ROOT) if (root / path).is_file()), None)
        if file is None or (name and name not in definitions(file.read_text(encoding="utf-8"))):
            missing.append(f"{path}:{name}")
    assert missing == []


def test_drawings_are_those_of_the_imports() -> None:
    """`python tests/drawings.py` draws them."""
    assert [name for name, drawn in DRAWINGS.items() if (IMAGES / name).read_text(encoding="utf-8") != drawn()] == []
    assert [place for _, place, _ in STAGES if not (SRC / place).exists()] == []


def definitions(source: str) -> set[str]:
    """Return the names of functions, classes and methods of a module."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{each.name}" for each in inner}
    return names


PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\[\]]+\]\(([^()\s]+)\)")


def anchors(path: Path) -> set[str]:
    """As code hosts make them of headings."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#{1,6} +(.*?) *$", FENCED.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "").lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(place), f"{page.name}: {target}"


def written_commands(page: Path) -> Iterator[list[str]]:
    """The commands of forerun in a page's shell blocks and in its lines, without the first word."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```(?:sh|bash)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`(forerun [^`]+)`", FENCED.sub("", text))]
    for line in lines:
        for command in re.findall(r"(?:^|[|;&] *|[A-Z]=\S* )forerun ([a-z-].*)", line):
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # prose in between
                continue
            yield words[: next((at for at, word in enumerate(words) if word in ("|", ">", "<", "&&", ";")), None)]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_python_blocks_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks of a page run in order, in one namespace; `print(...)  # TEXT` prints TEXT, up to " ..."."""
    pytest.importorskip("llguidance")
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {"__name__": page}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    printed = capsys.readouterr().out
    told = re.findall(r"print\(.*\)  # (?!such as )(.+)$", "".join(blocks), re.MULTILINE)
    assert blocks and [each for each in told if each.removesuffix(" ...") not in printed] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_flags_exist(page: Path) -> None:
    root = typer.main.get_command(app)
    for words in written_commands(page):
        command, rest = root, list(words)
        if rest[:1] == ["--config"]:
            del rest[:2]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]  # type: ignore[attr-defined]
        if hasattr(command, "commands"):  # the command is left open: train KIND, train …
            assert not rest or not re.match(r"[a-z]+$", rest[0]), f"{page.name}: no {rest[0]}: {words}"
            continue
        shown = [each for each in command.params if not getattr(each, "hidden", False)]  # others are keys of --config
        flags = {flag for each in shown for flag in (*each.opts, *each.secondary_opts)} | {"-h", "--help"}
        flags |= {"-m", "--model"} if any(each.name == "model" for each in shown) else set()
        for word in rest:
            assert not re.match(r"--?[a-z]", word) or word.partition("=")[0] in flags, f"{page.name}: {word}: {words}"


def test_the_readme_has_the_figures_of_the_measured_results() -> None:
    """`make report` writes them."""
    made = sections([load_results(path) for path in sorted((ROOT / "benchmarks").glob("*.json"))])
    readme = ROOT / "README.md"
    assert all(made.values()), "results of each section are there"
    assert put_into(readme, made) == readme.read_text(encoding="utf-8")


def test_the_readme_counts_families_as_the_table_does() -> None:
    table = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("| why not |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.count("|") == 6][1:]
    served = [row for row in rows if row[2] != "refused"]
    told = f"The fused decoder computes {len(DESCRIBED)} model families, all with bit-identical logits. "
    told += f"Of {len(rows)} others"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    verb = "is" if len(served) == 1 else "are"
    assert told in readme and f"{len(served)} {verb} served by" in readme
    assert f"and {len(rows) - len(served)} are refused" in readme
