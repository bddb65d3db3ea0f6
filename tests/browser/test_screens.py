"""Every screen and every person: sizes, themes, large text, the keyboard, scrolling, and what axe finds."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import pytest

from browser.conftest import NARROW, WIDE, Page

pytestmark = pytest.mark.slow

SIZES = {"wide": WIDE, "narrow": NARROW}
TEXT = """Here is a stack, as a class:

```python
class Stack:
    \"\"\"Items on top of each other.\"\"\"

    def __init__(self) -> None:
        self.items = []

    def push(self, item: int) -> None:
        self.items.append(item)
```

| method | cost |
|---|---|
| `push` | O(1) |

- **Push** puts an item on top, see [the docs](https://docs.python.org).
- *Pop* takes it.
"""


def faults(page: Page) -> list[str]:
    """Return what axe finds."""
    axe = pytest.importorskip("axe_playwright_python", reason="pip install '.[page]'")
    page.tab.evaluate((resources.files(axe) / "axe.min.js").read_text(encoding="utf-8"))
    found = page.tab.evaluate("axe.run(document, {resultTypes: ['violations']}).then(found => found.violations)")
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_and_axe_finds_nothing(page: Page, scheme: str, size: str) -> None:
    page.tab.emulate_media(color_scheme=scheme)
    page.tab.set_viewport_size(dict(zip(("width", "height"), SIZES[size])))
    page.set(max_tokens=30, seed=1)
    page.ask("Write a Python class Stack with push, pop and peek")
    page.answer_with([TEXT])
    page.ask("Now with types and a docstring, please")
    page.tab.wait_for_timeout(500)
    if folder := os.environ.get("FORERUN_SCREENSHOTS"):
        page.tab.screenshot(path=Path(folder) / f"{size}-{scheme}.png")
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    paper = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper.strip("rgb()").split(", "))) > 384) == (scheme == "light")
    assert faults(page) == []
    page.tab.click("#set")
    assert faults(page) == []
    if folder:
        page.tab.screenshot(path=Path(folder) / f"{size}-{scheme}-settings.png")
    page.tab.keyboard.press("Escape")
    if size == "narrow":
        page.tab.click("#menu-list")
        assert faults(page) == [] and page.inside("#search")
        page.tab.keyboard.press("Escape")
        assert page.tab.is_hidden("#search")


def test_a_theme_can_be_chosen(page: Page) -> None:
    page.tab.emulate_media(color_scheme="light")
    page.tab.select_option("#theme", "dark")
    page.tab.reload()
    assert page.tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 28)"


@pytest.mark.parametrize("size", SIZES)
def test_text_of_twice_the_size(page: Page, size: str) -> None:
    page.tab.set_viewport_size(dict(zip(("width", "height"), SIZES[size])))
    page.answer_with([TEXT])
    page.tab.evaluate("document.documentElement.style.fontSize = '200%'")
    page.ask("Large, please")
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.inside("#input") and page.inside("#send")


def test_a_keyboard_is_enough(page: Page) -> None:
    page.tab.evaluate("document.activeElement.blur()")
    stops = []
    for _ in range(16):
        page.tab.keyboard.press("Tab")
        stops.append(page.tab.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 5)"))
        assert page.tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    expected = ["new", "search", "import", "export-all", "theme", "colours", "tell", "set", "scroll"]
    assert stops == [*expected, "Repea", "Write", "Count", "input", "attach", "keys-button", "send"]
    page.tab.focus("#input")
    page.tab.keyboard.type("a line")
    page.tab.keyboard.press("Shift+Enter")
    page.tab.keyboard.type("another")
    assert page.tab.input_value("#input") == "a line\nanother"
    page.tab.keyboard.press("Control+/")
    assert page.tab.is_visible("#keys")
    page.tab.keyboard.press("Escape")
    page.answer_with(["word "] * 5, hold=True)
    page.tab.focus("#input")
    page.tab.keyboard.press("Enter")
    page.until("window.asked.length === 1")
    page.tab.evaluate("window.more()")
    page.tab.keyboard.press("Escape")
    page.ended()
    assert page.texts(".line .state") == ["stopped by you"] and page.tab.input_value("#input") == ""


def test_it_scrolls_along_unless_one_scrolls_up(page: Page) -> None:
    page.answer_with(["a line of the answer\n\n"] * 120, hold=True)
    page.begin("Write much")
    page.until("window.asked.length === 1")
    for _ in range(60):
        page.tab.evaluate("window.more()")
    page.tab.evaluate("""window.rest = () => {
        const {scrollHeight, scrollTop, clientHeight} = document.getElementById("scroll");
        return scrollHeight - scrollTop - clientHeight;
    }""")
    rest = "window.rest()"
    page.until(f"document.querySelectorAll('.block').length === 60 && {rest} < 3")
    page.tab.mouse.move(600, 300)
    page.tab.mouse.wheel(0, -400)
    page.until(f"{rest} > 200 && !document.getElementById('to-end').hidden")
    before = page.tab.evaluate("document.getElementById('scroll').scrollTop")
    for _ in range(30):
        page.tab.evaluate("window.more()")
    page.until("document.querySelectorAll('.block').length === 90")
    assert abs(page.tab.evaluate("document.getElementById('scroll').scrollTop") - before) < 3
    page.tab.click("#to-end")
    page.until(f"{rest} < 3 && document.getElementById('to-end').hidden")
    for _ in range(40):
        page.tab.evaluate("window.more()")
    page.ended()
    page.until(f"{rest} < 3")


def test_a_screen_reader_hears_sentences(page: Page) -> None:
    page.answer_with(["One sentence. ", "Another ", "one."])
    page.ask("Speak")
    assert page.texts("#spoken p") == ["One sentence. Another one."]
    assert page.tab.get_attribute("#scroll", "aria-live") is None


def test_nothing_moves_where_that_is_wished(page: Page) -> None:
    page.tab.emulate_media(reduced_motion="reduce")
    page.answer_with(["a "], hold=True)
    page.begin("Go")
    page.until("document.querySelector('[aria-busy=true] .line .state')")
    name = page.tab.evaluate("getComputedStyle(document.querySelector('.line .state'), '::before').animationName")
    assert name == "none"
    page.tab.keyboard.press("Escape")
    page.ended()
