"""What a model writes: Markdown, code, and attacks; and that no frame takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from browser.conftest import Page

pytestmark = pytest.mark.slow

MARKDOWN = """# Title

Some *emphasis*, `code`, and a [link](https://example.org/).

| a | b |
|---|---|
| 1 | 2 |

1. one
   ```js
   let nested = 1;
   ```
2. two

- [x] done

```python
def f(x):
    return x
```

After.
"""
ATTACKS = {
    "a tag": "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>",
    "in a paragraph": 'text <b onclick="document.title=\'attacked\'">bold</b> <iframe src="data:text/html,x"></iframe>',
    "a link": "[a](javascript:document.title='attacked') [b](data:,x) [c](vbscript:x) [d](/live) <javascript:a>",
    "an image": "![alt](http://127.0.0.2:9/pixel.png) ![](data:image/svg+xml,x)",
    "a language": "```\"><script>document.title='attacked'</script>\nx\n```",
    "a title": "[a](https://a.example 'x\" onmouseover=\"document.title=1')",
    "mathematics": "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "a form": "<form action='https://a.example'><input name=a><button>Send</button></form>",
    "a style": "<style>body{display:none}</style><div style='position:fixed;inset:0'>over</div>",
    "overrides": "safe \u202e txet desrever \u2066 and\n\n```py\n# \u202e\n```",
}
LONG = {
    "no line break": "x" * 5_000_000,
    "no line break in code": "```\n" + "x" * 5_000_000,
    "short lines": "a line\n" * 20_000,
    "paragraphs": "a line\n\n" * 10_000,
    "brackets": "[" * 50_000,
    "stars": "*a _b " * 20_000,
    "quotes": ">" * 20_000,
    "ticks": "`" * 3 + "`` a " * 10_000,
    "list": "- item\n" * 20_000,
    "table": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 10_000,
}


@contextmanager
def longest_task(page: Page, name: str, most: float) -> Iterator[None]:
    """Measure the longest task of the page's thread, in milliseconds of processor time, which a busy machine does not
    lengthen much. It is printed, and must be at most so long."""
    browser = page.tab.context.browser
    browser.start_tracing(page=page.tab, categories=["disabled-by-default-devtools.timeline", "toplevel"])
    yield
    events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = {
        (each["pid"], each["tid"])
        for each in events
        if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
    }
    tasks = [each.get("tdur", 0) for each in events if (each["pid"], each["tid"]) in threads and each.get("ph") == "X"]
    longest = max(tasks) / 1000
    print(f"{name}: the longest task takes {longest:.0f} ms")
    assert longest <= most


def test_markdown(page: Page) -> None:
    page.answer_with([MARKDOWN])
    page.ask("Show it")
    assert page.texts(".block h3") == ["Title"] and page.texts(".block em") == ["emphasis"]
    assert page.texts(".block td") == ["1", "2"] and page.texts(".block li")[-1] == "☑ done"
    assert page.tab.get_attribute(".block a", "rel") == "noopener noreferrer nofollow"
    assert page.texts(".bar > span") == ["js", "python"] and page.texts(".code .hljs-keyword")[:1] == ["let"]
    assert page.texts("ol > li")[0].startswith("one")
    page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.tab.locator(".bar button", has_text="Copy").last.click()
    page.until("document.querySelectorAll('.bar button')[3].textContent === 'Copied'")
    assert page.tab.evaluate("navigator.clipboard.readText()") == "def f(x):\n    return x\n"


def test_a_long_table_stays_one(page: Page) -> None:
    page.answer_with(["| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 1000])
    page.ask("Show it")
    page.until("document.querySelectorAll('.block td').length === 2000")
    assert "|" not in page.texts(".message.assistant .text")[0]


def test_an_open_fence_is_code(page: Page) -> None:
    page.answer_with(["Look:\n\n```py\n", "x = 1\n", "y = 2\n", "```\n", "Done."], hold=True)
    page.begin("Show it")
    page.until("window.asked.length === 1")
    for _ in range(2):
        page.tab.evaluate("window.more()")
    page.until("document.querySelector('.code pre')?.textContent === 'x = 1\\n'")
    for _ in range(6):
        page.tab.evaluate("window.more()")
    page.ended()
    assert page.texts(".code pre") == ["x = 1\ny = 2\n"] and page.texts(".block")[-1].strip() == "Done."


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_models_text_is_never_html(page: Page, attack: str) -> None:
    page.answer_with([ATTACKS[attack]])
    page.ask("Attack")
    page.tab.wait_for_timeout(100)
    found = page.tab.eval_on_selector_all(
        ".message.assistant .text *",
        """all => all.flatMap(each => [each.localName, ...[...each.attributes].map(({name, value}) =>
            name === "href" && !/^https?:/.test(value) ? "bad href" : name)])""",
    )
    made = {"div", "bar", "span", "button", "pre", "code", "p", "a", "class", "dir", "tabindex", "type", "aria-pressed"}
    assert set(found) <= made | {"href", "title", "target", "rel"}
    assert "attack" not in page.tab.title().lower().replace("attack ·", "") and page.inside("#input")
    if attack == "overrides":
        text = page.texts(".message.assistant .text")[0]
        assert "[U+202E]" in text and not {"\u202e", "\u2066"} & set(text)


@pytest.mark.parametrize("kind", LONG)
def test_long_texts_are_harmless_and_quick(page: Page, kind: str) -> None:
    page.answer_with([LONG[kind]])
    with longest_task(page, kind, 250):
        page.ask("Write much")
        page.until("document.querySelectorAll('.block').length > 0")
        page.tab.wait_for_timeout(600)


def test_frames_are_short_with_8000_tokens_in_view(page: Page) -> None:
    section = "Some text with `code` and *emphasis*, of a few words a line.\n\n- one\n- two\n\n```py\nx = 1\n```\n\n"
    text = section * 320  # some 8,000 tokens
    pieces = [text[at : at + 24] for at in range(0, len(text), 24)]
    page.answer_with([text], hold=False)
    page.ask("Write much")
    page.answer_with(pieces[:400], hold=True)
    page.begin("Go on")
    page.until("window.asked.length === 1")
    with longest_task(page, "8,000 tokens in view", 50):
        page.tab.evaluate("window.feeding = setInterval(() => window.more(), 5)")
        page.ended()


def test_thinking_is_folded(page: Page) -> None:
    page.answer_with([{"reasoning_content": "Let me see. "}, "Yes."])
    page.ask("Think")
    assert page.texts(".assistant .thinking summary")[0].startswith("Thought for")
    assert page.tab.get_attribute(".assistant .thinking", "open") is None
    assert page.texts(".assistant .thoughts") == ["Let me see. "] and page.texts(".text .block p") == ["Yes."]


def test_calls_of_tools_and_their_results(page: Page) -> None:
    call = {"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    page.answer_with([{"tool_calls": [call]}], ending="tool_calls")
    page.ask("Weather?")
    assert page.texts(".call strong") == ["weather"] and page.texts(".line .state") == ["calls tools"]
    page.tab.fill(".call textarea", "Rain")
    page.tab.click(".call button")
    page.until("window.asked.length === 2")
    page.ended()
    sent = page.tab.evaluate("window.asked[1].messages")
    assert [each["role"] for each in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"] == "c1"
    assert page.texts(".message.tool .text") == ["Rain"]


def test_the_last_result_of_several_calls_is_answered(page: Page) -> None:
    function = {"name": "weather", "arguments": "{}"}
    page.answer_with(
        [{"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]} for index in range(2)],
        ending="tool_calls",
    )
    page.ask("Weather in two towns?")
    page.tab.locator(".call textarea").nth(0).fill("Rain")
    page.tab.locator(".call textarea").nth(1).fill("Sun")
    page.tab.locator(".call button").nth(1).click()
    page.until("document.querySelectorAll('.call textarea').length === 1")
    assert page.tab.evaluate("window.asked.length") == 1 and page.tab.input_value(".call textarea") == "Rain"
    page.answer_with(["Mixed."])
    page.tab.click(".call button")
    page.ended()
    sent = page.tab.evaluate("window.asked[0].messages")
    assert [each.get("tool_call_id") for each in sent] == [None, None, "c1", "c0"] and not page.texts(".call textarea")
    page.tab.locator(".message.tool").first.locator("button", has_text="Edit").click()
    page.tab.keyboard.type("Sun and wind")
    page.tab.keyboard.press("Enter")
    page.until("document.querySelectorAll('.call textarea').length === 1")
    assert page.tab.evaluate("window.asked.length") == 1 and len(page.texts(".message")) == 3
