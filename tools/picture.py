"""The picture of the demo that heads the README: `python -m tools.picture RESULTS SVG`, of what `demo --json` wrote."""

from __future__ import annotations

import sys
from pathlib import Path

from forerun.cli.demo_screen import picture
from forerun.lab.bench.minute import recorded
from forerun.lab.bench.tables import Table
from forerun.lab.results.files import load_results


def drawn(results: Path) -> str:
    """Draw the demo of a file of results, as SVG. Raises ConfigError where it cannot be read."""
    found = load_results(results)
    (table,) = found.tables
    return picture(
        recorded(found.details["performances"]), Table("", table.header, table.rows), found.details["closing"]
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(drawn(Path(sys.argv[1])), encoding="utf-8")
