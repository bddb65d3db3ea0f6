"""Documents that must stay true: the rooms that docs/design.md lists are those that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "forerun"


def test_design_has_one_line_per_module() -> None:
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    listed = re.findall(r"^- `([\w/]+\.py)` — \S", text, flags=re.MULTILINE)
    modules = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if not path.name.startswith("__")}
    assert len(listed) == len(set(listed))
    assert set(listed) == modules
