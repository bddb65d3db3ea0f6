"""The page in a headless Chromium, against a server with the bundled model; `make page` runs it.

It runs where there is a Chromium (Debian's package, or FORERUN_CHROMIUM names one) and Playwright (`pip install
'.[page]'`). With FORERUN_SCREENSHOTS it leaves pictures in that folder.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mixed_requests import load
from serving import LIMIT, Served, serving

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
WIDE, NARROW = (1180, 720), (390, 844)


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving(load(drafter=["draft-model", "suffix"], num_draft_tokens=4)) as running:
        running.service.name = "/srv/models/bundled"
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install '.[page]'")
    program = os.environ.get("FORERUN_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium, or FORERUN_CHROMIUM=PROGRAM")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=[*FLAGS, "--disable-component-update"])
        yield made
        made.close()


class Page:
    """The page in a tab, and what went wrong in it."""

    def __init__(self, context: Any, url: str) -> None:
        self.tab = context.new_page()
        self.url = url
        self.problems: list[str] = []
        self.tab.set_default_timeout(20_000)
        self.tab.on("pageerror", lambda error: self.problems.append(str(error)))
        self.tab.on("console", self._heard)
        self.tab.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        # Chromium itself complains of responses that are errors
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.problems.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(request.url)

    def open(self, path: str = "/") -> None:
        """Load the page, and wait until it is connected."""
        self.tab.goto(self.url + path)
        self.until("document.getElementById('connection').textContent === ''")

    def until(self, expression: str) -> None:
        """Wait until it is true. The page's own policy forbids what Playwright would wait with."""
        end = time.monotonic() + LIMIT
        while not self.tab.evaluate(expression):
            assert time.monotonic() < end, expression
            self.tab.wait_for_timeout(20)

    def set(self, **settings: object) -> None:
        """Set what the conversation has in the dialog, by the fields' names."""
        self.tab.click("#set")
        for name, value in settings.items():
            field = f"#set-{name}"
            if self.tab.eval_on_selector(field, "each => each.tagName") == "SELECT":
                self.tab.select_option(field, str(value))
            else:
                self.tab.fill(field, str(value))
        self.tab.click("#settings button[value=save]")

    def begin(self, text: str) -> None:
        """Send a message."""
        self.tab.fill("#input", text)
        self.tab.keyboard.press("Enter")

    def ask(self, text: str) -> None:
        """Send a message, and wait until its answer has ended."""
        self.begin(text)
        self.ended()

    def ended(self) -> None:
        """Wait until nothing is written."""
        self.tab.wait_for_timeout(50)
        self.until("document.getElementById('stop').hidden && !document.querySelector('[aria-busy=true]')")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.tab.eval_on_selector_all(selector, "all => all.map(each => each.textContent)")
        return found

    def coloured(self) -> list[list[str]]:
        """Return the coloured texts, by colour, in the order of the page."""
        found: list[list[str]] = self.tab.evaluate(COLOURED)
        return found

    def act(self, name: str, role: str = "assistant") -> None:
        """Press a button of the last message of a role."""
        self.tab.locator(f".message.{role}").last.locator(".actions button", has_text=name).click()

    def inside(self, selector: str) -> bool:
        """Return whether an element's lower end is in the window."""
        found: bool = self.tab.eval_on_selector(
            selector,
            "each => { const {bottom, top} = each.getBoundingClientRect(); return bottom > 0 && top < innerHeight && "
            "bottom <= innerHeight + 1 }",
        )
        return found

    def answer_with(self, pieces: list[Any], *, hold: bool = False, ending: str | None = "stop") -> None:
        """Let chats be answered by the page's own `fetch`, which notes their bodies in `window.asked`.

        Args:
            pieces: each a chunk: a text, a text with its drafter, what else a delta has, or a comment with its colon.
            hold: a piece comes with each call of `window.more()`, and the end with one more.
            ending: None: the connection ends before the answer does.
        """
        self.tab.evaluate(MODEL, [pieces, hold, ending])


COLOURED = """() => [...CSS.highlights.values()].map((each) => [...each].map(
    (range) => range.startContainer.textContent.slice(range.startOffset, range.endOffset)))"""
MODEL = """([pieces, hold, ending]) => {
    window.original ??= window.fetch;
    window.asked = [];
    const event = (choice, more = {}) => `data: ${JSON.stringify({choices: choice ? [choice] : [], ...more})}\\n\\n`;
    const encode = (piece) => {
        if (Array.isArray(piece)) return event({index: 0, delta: {content: piece[0]}, drafts: [piece]});
        if (typeof piece === "object") return event({index: 0, delta: {content: "", ...piece}, drafts: [["a", null]]});
        if (piece.startsWith(":")) return `${piece}\\n\\n`;
        return event({index: 0, delta: {content: piece}, drafts: [[piece, null]]});
    };
    const usage = {prompt_tokens: 7, completion_tokens: pieces.length};
    const last = {index: 0, delta: {content: ""}, finish_reason: ending};
    const end = [event(last), event(null, {usage}), "data: [DONE]\\n\\n"];
    window.fetch = (path, sent = {}) => {
        if (!String(path).endsWith("/completions")) return window.original(path, sent);
        window.asked.push(JSON.parse(sent.body));
        const events = [...pieces.map(encode), ...(ending ? [end.join("")] : [])];
        const encoder = new TextEncoder();
        const body = new ReadableStream({
            start(controller) {
                const next = () => events.length && controller.enqueue(encoder.encode(events.shift()));
                window.more = () => events.length && (next(), events.length || controller.close());
                sent.signal?.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
                if (hold) return;
                while (events.length) next();
                controller.close();
            },
        });
        return Promise.resolve(new Response(body, {status: 200}));
    };
}"""


@pytest.fixture
def tabs(browser: Any, served: Served) -> Iterator[Callable[..., Page]]:
    """Makes pages, of one browser's profile; at the end nothing may have come from elsewhere, nor have gone wrong."""
    context = browser.new_context(viewport=dict(zip(("width", "height"), WIDE)), accept_downloads=True)
    made: list[Page] = []

    def opened() -> Page:
        made.append(Page(context, served.url))
        made[-1].open()
        return made[-1]

    yield opened
    problems = [each for page in made for each in page.problems]
    context.close()
    served.settle()
    assert not problems


@pytest.fixture
def page(tabs: Callable[..., Page]) -> Page:
    return tabs()


def bodies(page: Page) -> list[dict[str, Any]]:
    """Return the bodies of the chats that this page sends from now on, a list that grows."""
    found: list[dict[str, Any]] = []

    def heard(request: Any) -> None:
        if request.url.endswith("/completions"):
            found.append(json.loads(request.post_data))

    page.tab.on("request", heard)
    return found
