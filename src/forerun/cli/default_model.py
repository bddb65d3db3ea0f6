"""Which model a command takes without --model: one rule for all of them."""

from __future__ import annotations

import typer

from forerun.config import BUNDLED_TARGET
from forerun.fetch import store


def chosen_model(model: str | None, flag: str = "--model") -> str:
    """The flag's value; without one a fetched model, else the bundled one, which is said on standard error."""
    if model is not None:
        return model
    chosen = store.default_model()
    why = "it is fetched"
    if chosen == BUNDLED_TARGET:
        why = f"no other is fetched; `forerun fetch {store.names()[0]}` brings a chat model"
    typer.echo(f"forerun: no {flag} given, so it is {chosen} ({why})", err=True)
    return chosen
