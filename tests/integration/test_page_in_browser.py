"""The playground in a headless Chromium: what it shows, what its switch does, and that a keyboard is enough.

It runs where there is a Chromium (Debian's package, or FORERUN_CHROMIUM names one) and `pip install playwright`. With
FORERUN_SCREENSHOTS it leaves pictures in that folder.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mixed_requests import COMPLETIONS, load
from serving import LIMIT, Served, serving

pytestmark = pytest.mark.slow
PROMPT = "def quicksort(items):"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
WIDTHS = {"wide": (1180, 720), "narrow": (390, 844)}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(load(drafter=["draft-model", "suffix"], num_draft_tokens=4)) as running:
        running.service.name = "bundled"
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install playwright")
    program = os.environ.get("FORERUN_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("there is no Chromium: install it, or FORERUN_CHROMIUM=PROGRAM")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=[*FLAGS, "--disable-component-update"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, connected; at the end nothing may have come from elsewhere, nor anything have gone wrong."""
    made = browser.new_page(viewport=dict(zip(("width", "height"), WIDTHS["wide"])))
    made.set_default_timeout(1000 * LIMIT)
    problems: list[str] = []
    made.on("pageerror", lambda error: problems.append(str(error)))
    made.on("console", lambda message: problems.append(message.text) if told(message) else None)
    made.on("request", lambda request: problems.append(request.url) if not ours(request.url, served) else None)
    made.goto(served.url)
    until(made, "document.getElementById('model').textContent === 'bundled'")
    yield made
    made.close()
    served.settle()
    assert not problems


def ours(url: str, served: Served) -> bool:
    return url.startswith((served.url, "data:"))


def told(message: Any) -> bool:
    """Whether the script or the policy complains; of a response that is an error Chromium says so itself."""
    return message.type == "error" and not message.text.startswith("Failed to load resource")


def until(page: Any, expression: str) -> None:
    """Wait until it is true. The page's own policy forbids what Playwright would wait with."""
    end = time.monotonic() + LIMIT
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(10)


def ask(page: Any, text: str, *, tokens: int = 60, seed: int = 3) -> None:
    """Let the page ask, and wait until the answer has ended."""
    page.fill("#tokens", str(tokens))
    page.fill("#seed", str(seed))
    page.fill("#input", text)
    page.click("#send")
    until(page, "!document.getElementById('send').disabled")


def spans(page: Any, selector: str) -> list[str]:
    found: list[str] = page.eval_on_selector_all(selector, "all => all.map(each => each.textContent)")
    return found


def answered(page: Any) -> str:
    return "".join(spans(page, ".turn:last-child > span:not(.who):not(.prompt)"))


def test_a_completion_streams_in_the_colours_of_its_drafters(page: Any, served: Served) -> None:
    page.check("input[value=completion]")
    grown = page.evaluate_handle("""() => {
        const sizes = new Set();
        const output = document.getElementById("output");
        const note = () => sizes.add(output.textContent.length);
        new MutationObserver(note).observe(output, {childList: true, subtree: true});
        return sizes;
    }""")
    ask(page, PROMPT)
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 3, "temperature": 0.7}
    text = httpx.post(served.url + COMPLETIONS, json=body, timeout=LIMIT).json()["choices"][0]["text"]
    assert answered(page) == text and spans(page, ".prompt") == [PROMPT]
    assert grown.evaluate("sizes => sizes.size") > 3
    drafters = {title.removeprefix("drafted by ") for title in titles(page)}
    assert drafters and drafters <= {"draft-model", "suffix"}
    assert spans(page, "#legend .draft") == list(dict.fromkeys(titles(page, strip=True)))
    colours = {colour(page, selector) for selector in ("#output", ".turn .draft")}
    assert len(colours) == 2
    assert float(page.text_content("#speed")) > 0 and " of " in page.text_content("#accepted")
    until(page, "document.getElementById('batch').textContent.endsWith('of 32')")


def titles(page: Any, *, strip: bool = False) -> list[str]:
    found: list[str] = page.eval_on_selector_all(".turn .draft", "all => all.map(each => each.title)")
    return [each.removeprefix("drafted by ") for each in found] if strip else found


def colour(page: Any, selector: str) -> str:
    found: str = page.eval_on_selector(selector, "each => getComputedStyle(each).backgroundColor")
    return found


def test_the_switch_changes_no_text(page: Any) -> None:
    texts, drafted = [], []
    for choice in ("", "suffix", "none"):
        page.select_option("#speculative", choice)
        page.click("#clear")
        ask(page, "Write a loop.")
        texts.append(answered(page))
        drafted.append(set(titles(page, strip=True)))
    assert texts[0] and texts[0] == texts[1] == texts[2]
    assert drafted[0] == {"draft-model"} and drafted[1] <= {"suffix"} and drafted[2] == set()


def test_an_answer_twice_side_by_side(page: Any) -> None:
    assert page.is_visible("#greeting")
    page.check("#compare")
    page.fill("#tokens", "40")
    page.click("#example-2")
    until(page, "!document.getElementById('send').disabled")
    plain, speculative = spans(page, ".pair .who")
    assert re.fullmatch(r"plain: [\d.]+ tokens per second", plain)
    assert re.fullmatch(r"speculative: [\d.]+ tokens per second", speculative)
    texts = ["".join(spans(page, f".pair .turn:nth-child({place}) > span:not(.who)")) for place in (1, 2)]
    assert texts[0] and texts[0] == texts[1] and page.is_hidden("#greeting")


def test_a_keyboard_is_enough(page: Any, served: Served) -> None:
    page.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(14):
        page.keyboard.press("Tab")
        stops.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    expected = ["mode", "speculative", "compare", "clear", "example-1", "example-2", "example-3"]
    expected += ["output", "input", "send", "temperature", "tokens", "seed", "key"]
    assert stops == expected
    page.fill("#tokens", "1500")
    page.focus("#input")
    page.keyboard.type("a line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("another")
    assert page.input_value("#input") == "a line\nanother"
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.turn span').length > 5")
    assert page.input_value("#input") == "" and page.is_disabled("#send")
    page.keyboard.press("Escape")
    until(page, "!document.getElementById('send').disabled")
    assert page.evaluate("document.activeElement.id") == "input" and page.is_hidden("#problem")
    served.settle()  # the request has ended with the wait for it


def test_what_went_wrong_is_said(page: Any, served: Served) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#input", "a")
    page.click("#send")
    page.wait_for_selector("#problem:not([hidden])")
    page.unroute("**/v1/chat/completions")
    page.fill("#input", "word " * 3000)
    with page.expect_response("**/v1/chat/completions") as refused:
        page.keyboard.press("Enter")
    assert refused.value.status == 400
    until(page, "document.getElementById('problem').textContent.includes('context')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits(page: Any, scheme: str, width: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size(dict(zip(("width", "height"), WIDTHS[width])))
    page.check("input[value=completion]")
    ask(page, PROMPT, tokens=70)
    page.select_option("#speculative", "suffix")
    ask(page, "numbers = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", tokens=40)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert (sum(map(int, colour(page, "body").strip("rgb()").split(", "))) > 384) == (scheme == "light")
    if folder := os.environ.get("FORERUN_SCREENSHOTS"):
        page.wait_for_timeout(1500)  # until the figures of the server have come
        page.screenshot(path=Path(folder) / f"{width}-{scheme}.png")
