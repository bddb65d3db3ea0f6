"""What the clients' scripts share: the servers, and steps of which each is reported on one line of JSON.

FORERUN_CHAT, FORERUN_TOOLS and FORERUN_SCRIPTED are the addresses, without a path, of servers of SmolLM2 ("smollm2"),
of a random model whose template has tools ("tools") and of one that writes what its prompt says ("coder").
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CHAT, TOOLS, SCRIPTED = (os.environ[f"FORERUN_{name}"] for name in ("CHAT", "TOOLS", "SCRIPTED"))
CHAT_V1, TOOLS_V1 = f"{CHAT}/v1", f"{TOOLS}/v1"
CITIES = ["Oslo", "Lima"]
PAGE = 64
"""Tokens of a page of the cache, the unit in which prompts are reused."""
QUESTION = "Which is the capital of France?"
"""For SmolLM2 at temperature 0, whose answer names it."""


def package(name: str, number: str | None = None) -> None:
    """Report which package the following steps are of. number: of its version; None: as it is installed here."""
    print("\n" + json.dumps({"client": name, "version": number or version(name)}), flush=True)


def step(take: Callable[[], Any]) -> None:
    """Take a step of a script and report it by the function's name."""
    _report(take, None)


def cannot(reason: str) -> Callable[[Callable[[], Any]], None]:
    """Report a step that must fail, since the server or the model cannot do it for this reason."""
    return lambda take: _report(take, reason)


def _report(take: Callable[[], Any], reason: str | None) -> None:
    error = None
    try:
        take()
    except Exception as caught:  # whatever a client raises is what is reported
        error = f"{type(caught).__name__}: {caught}"
    name = take.__name__.strip("_").replace("_", " ")
    # on a line of its own, whatever a client has printed
    print("\n" + json.dumps({"step": name, "error": error, "cannot": reason}), flush=True)


def documented(word: str, address: str) -> str:
    """Return the code block of docs/serving.md that has this word, with the address of a server in place of its own."""
    blocks = re.findall(r"^```\w+\n(.*?)^```", Path("docs/serving.md").read_text(encoding="utf-8"), re.M | re.S)
    (found,) = (block for block in blocks if word in block)
    return found.replace("http://localhost:8000", address)
