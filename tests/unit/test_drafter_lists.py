"""Lists of drafters outside the table name the drafters of the table."""

from __future__ import annotations

import re
from pathlib import Path

import forerun
from forerun.cli.options import choose_drafters
from forerun.drafters import DRAFTERS, Drafter

ROOT = Path(__file__).parents[2]


def test_every_list_of_drafters_is_that_of_the_table() -> None:
    """What the code lists is all of the table, in its order; documents may lack a drafter, but know no other one."""
    classes = [row.class_name for row in DRAFTERS.values()]
    assert [name for name in classes if name not in forerun.__all__] == []
    assert all(issubclass(getattr(forerun, name), Drafter) for name in classes)
    assert all(row.make is getattr(forerun, row.class_name) for row in DRAFTERS.values())
    assert list(choose_drafters("bundled", None, None)) == [n for n, row in DRAFTERS.items() if row.serves("bundled")]

    methods = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    ways = methods[methods.index("| drafter | drafts with |") :].partition("\n\n")[0]
    for listed in (re.findall(r"`([a-z-]+)`", ways), re.findall(r"^### `([^`]+)`", methods, re.MULTILINE)):
        assert len(listed) >= 5 and len(set(listed)) == len(listed)
        assert [name for name in listed if name not in DRAFTERS] == []
