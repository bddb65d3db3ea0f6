"""`forerun drafters`: which drafters there are."""

from __future__ import annotations

from forerun.cli import options
from forerun.cli.output import print_json


def drafters(json: options.Json = False) -> None:
    """List the drafters, with what they draft with and the options that NAME:key=value,key=value may set."""
    from forerun.drafters import DRAFTERS
    from forerun.drafters.third_party import installed_drafters

    if json:
        rows = {
            name: {"kind": row.kind, "description": row.description, "options": row.options, "asks": row.needed_option}
            for name, row in DRAFTERS.items()
        }
        print_json(rows | {name: {"kind": "installed", "class": place} for name, place in installed_drafters().items()})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("drafter", "what it does", "options")
    for name, row in DRAFTERS.items():
        table.add_row(name, row.description, ", ".join(row.options))
    for name, place in installed_drafters().items():
        table.add_row(name, f"an installed package's: {place}", "")
    console = Console()
    console.print(table)
    console.print("Written as NAME, or NAME:key=value,key=value. docs/methods.md tells when each helps.")
