"""`forerun drafters`."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.drafters import DRAFTERS
from forerun.drafters.option_help import drafter_options
from forerun.drafters.parse_text import K_OPTION, option_types

from .conftest import Invoke


def test_every_drafter_is_listed_with_its_options(invoke: Invoke) -> None:
    listed = json.loads(invoke("drafters", "--json").stdout)
    assert list(listed) == list(DRAFTERS)
    assert listed["suffix"]["kind"] == "lookup"
    assert listed["suffix"]["options"]["min_match"]["default"] == 1
    lines = invoke("drafters").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(DRAFTERS)
    text = invoke("drafters", "suffix").stdout
    assert text.startswith("suffix: ")
    assert "    min_match=1 (int)\n        tokens that must match at least (1 or more)." in text
    assert "    drawn=true (bool)\n" in invoke("drafters", "eagle-tree").stdout
    assert "Did you mean suffix?" in invoke("drafters", "sufix").stderr


THEIRS = """
from forerun import Drafter

class Wide(Drafter):
    \"\"\"Drafts as widely
    as it can.

    Args:
        width: of its trees (1 or more).
    \"\"\"

    def __init__(self, width: int = 3, table: object = None):
        self.width = width
"""


def test_a_class_of_another_package_is_described(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `--drafter` takes, with or without options after it."""
    (tmp_path / "their_drafting.py").write_text(THEIRS)
    monkeypatch.syspath_prepend(tmp_path)
    for text in ("their_drafting:Wide", "their_drafting:Wide:width=4"):
        shown = invoke("drafters", text).stdout
        assert shown.startswith("their_drafting:Wide: Drafts as widely as it can.\n")
        assert "    width=3 (int)\n        of its trees (1 or more)." in shown and "table" not in shown
        assert f"    {K_OPTION}=auto (int)" in shown
    described = json.loads(invoke("drafters", "their_drafting:Wide", "--json").stdout)
    assert described["their_drafting:Wide"]["options"]["width"]["default"] == 3
    assert invoke("drafters", "suffix:min_match=2").stdout == invoke("drafters", "suffix").stdout
    assert list(json.loads(invoke("drafters", "suffix", "--json").stdout)) == ["suffix"]
    assert "holds no class Narrow" in invoke("drafters", "their_drafting:Narrow").stderr


@pytest.mark.parametrize("name", DRAFTERS)
def test_what_the_source_says_is_what_the_class_takes(name: str) -> None:
    row = DRAFTERS[name]
    *read, k = drafter_options(row)
    taken = inspect.signature(row.make).parameters
    types = option_types(row.make)
    assert {each.name: each.type for each in read} == {key: kind.__name__ for key, kind in types.items()}
    assert {each.name: each.default for each in read} == {key: taken[key].default for key in types}
    assert all(each.help for each in read)
    for each in read:
        if each.type in ("int", "float"):
            assert "(" in each.help, f"the range of {each.name}"
    assert k.name == K_OPTION


def test_the_list_loads_no_torch() -> None:
    code = "import sys; from forerun.cli.main import app; app(['drafters'], standalone_mode=False); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False"
