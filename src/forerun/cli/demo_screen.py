"""The terminal output of the demo: text as it streams, a progress bar, tables.

Nothing is drawn while a run is timed: the streams shown are not the runs that are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from forerun.lab.bench import tables

FRAMES_PER_SECOND = 15
LINES = 18
BORDERS = 4
"""Columns of a panel's sides."""


def split_accepted(tokenizer: Any, chunk: Any) -> tuple[str, str]:
    """Split a chunk's text into the draft's part and the token that the target added.

    The first `num_accepted_draft` tokens of a chunk are the draft's. If the chunk's text does not begin with them as
    decoded alone (a character in several tokens, a stop string cut off), it counts as the draft's if most of it is.
    """
    count = chunk.num_accepted_draft
    if not count:
        return "", chunk.text
    drafted = tokenizer.decode(chunk.token_ids[:count])
    if chunk.text.startswith(drafted):
        return drafted, chunk.text[len(drafted) :]
    return (chunk.text, "") if 2 * count >= len(chunk.token_ids) else ("", chunk.text)


class Scene:
    """A prompt and its growing answer: the prompt dim, draft tokens in colour."""

    def __init__(self, title: str, prompt: str, redraw: Callable[[], None]) -> None:
        self.title = title
        self._text = Text.assemble((prompt, "dim"))
        self.answer = ""
        self._redraw = redraw
        self._tokens = self._accepted = 0
        self._start = time.perf_counter()

    def add(self, tokenizer: Any, chunk: Any) -> None:
        """Append a StreamChunk."""
        drafted, added = split_accepted(tokenizer, chunk)
        self._text.append(drafted, style="bold green")
        self._text.append(added)
        self.answer += chunk.text
        self._tokens += len(chunk.token_ids)
        self._accepted += chunk.num_accepted_draft
        self._redraw()

    @property
    def status(self) -> str:
        """Return the number of tokens, their speed, and how many a draft had right."""
        seconds = time.perf_counter() - self._start
        return f"{self._tokens} tokens, {self._tokens / seconds:.0f} tokens/s, {self._accepted} of them drafted"

    def panel(self, console: Console) -> Panel:
        """Return the last lines of the text, as wide as the console."""
        lines = self._text.wrap(console, max(1, console.width - BORDERS))[-LINES:]
        body = Group(*lines, *[Text()] * (LINES - len(lines)))
        return Panel(body, title=self.title, subtitle=self.status, title_align="left", subtitle_align="right")


class Stage:
    """Output of the demo. On a pipe streams are not drawn; with `quiet`, standard output stays empty."""

    def __init__(self, quiet: bool) -> None:
        self._out = Console(stderr=quiet, highlight=False)
        self._quiet = quiet
        is_terminal = self._out.is_terminal
        self._live = Live(console=self._out, auto_refresh=False, transient=quiet) if is_terminal else None
        self._last_frame = 0.0

    def __enter__(self) -> Stage:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._quiet or self._live is not None:
            # a pipe has no width: there lines are not broken
            self._out.print(text, style="dim", markup=False, soft_wrap=self._live is None)

    def _draw(self, *parts: RenderableType) -> None:
        if self._live is not None:
            self._live.update(Group(*parts), refresh=True)

    @contextmanager
    def performance(self, title: str, prompt: str) -> Iterator[Scene]:
        """Show one text as it grows; its last frame stays until the next begins."""

        def redraw() -> None:
            now = time.perf_counter()
            if now - self._last_frame >= 1 / FRAMES_PER_SECOND:
                self._last_frame = now
                self._draw(scene.panel(self._out))

        scene = Scene(title, prompt, redraw)
        yield scene
        self._draw(scene.panel(self._out))
        if self._live is None:
            self.say(f"{scene.title}: {scene.status}")

    def transcript(self, question: str, answer: str) -> None:
        """Print a prompt and its answer if streams are not drawn, such as on a pipe."""
        if self._live is None:
            self.say("\n".join(f"> {line}" for line in question.splitlines()))
            self.say(f"{answer}\n")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[], None]]:
        """Show a bar that advances when the returned function is called; the last text stays above it."""
        bar = Progress(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), auto_refresh=False)
        task = bar.add_task(title, total=total)
        last = Text() if self._live is None else self._live.renderable

        def advance() -> None:
            bar.advance(task)
            self._draw(last, bar.get_renderable())

        yield advance
        self._draw(last)

    def table(self, measured: tables.Table) -> None:
        """Print a table; the last cell of a row is red unless it is "yes"."""
        table = Table(header_style="bold")
        for name in measured.header:
            table.add_column(name, justify="right" if table.columns else "left")
        for row in measured.rows:
            table.add_row(*row[:-1], Text(row[-1], style="bold" if row[-1] == "yes" else "red"))
        self._out.print(table, width=None if self._out.is_terminal else 120)  # a pipe has no width
