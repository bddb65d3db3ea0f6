"""Faults: servers that go away, errors, keys, storage that is forbidden or full; and that an idle page is quiet."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from browser.conftest import Page
from mixed_requests import load
from serving import Served, serving

pytestmark = pytest.mark.slow

KEY = "a-key"


def test_an_error_keeps_the_message(page: Page) -> None:
    page.tab.route("**/v1/chat/completions", lambda route: route.abort())
    page.begin("Keep me")
    page.until("!document.getElementById('problem').hidden")
    page.until("!document.querySelector('.message') && document.getElementById('input').value === 'Keep me'")
    assert "start it again" in str(page.tab.text_content("#problem"))
    page.tab.unroute("**/v1/chat/completions")
    page.tab.evaluate("window.dispatchEvent(new Event('focus'))")
    page.until("document.getElementById('problem').hidden && !document.getElementById('connection').textContent")
    page.tab.fill("#input", "word " * 3000)
    page.tab.keyboard.press("Enter")
    page.until("document.getElementById('problem').textContent.includes('context')")
    page.until("!document.querySelector('.message, #list a')")
    assert page.tab.input_value("#input") == "word " * 3000
    page.tab.keyboard.press("Control+k")
    assert page.tab.is_hidden("#problem")


def test_a_stream_that_ends_early_keeps_its_text(page: Page) -> None:
    page.answer_with(["Half"], ending=None)
    page.ask("Go")
    assert page.texts(".assistant .text")[0].strip() == "Half"
    assert page.texts(".line .state")[0].startswith("error: The connection ended")
    assert "Continue" in page.texts(".assistant .actions")[0]


def test_progress_is_told(page: Page) -> None:
    waits, reads = {"computed": 0, "prompt": 900, "waiting": 2}, {"computed": 300, "prompt": 900, "waiting": 0}
    page.answer_with([f": progress {json.dumps(each)}" for each in (waits, reads)] + ["x"], hold=True)
    page.begin("A long one")
    page.until("document.querySelector('.line .state')?.textContent === 'sent…'")
    page.tab.evaluate("window.more()")
    page.until("document.querySelector('.line .state').textContent === 'waiting: 2 requests before this one'")
    page.tab.evaluate("window.more()")
    page.until("document.querySelector('.line .state').textContent.includes('300 of 900 tokens, 600 left')")
    page.tab.evaluate("window.more(), window.more()")
    page.ended()


def test_the_server_tells_what_the_page_reads(page: Page) -> None:
    body = {"messages": [{"role": "user", "content": "word " * 50}], "max_tokens": 1, "stream": True}
    sent = {"method": "POST", "headers": {"content-type": "application/json"}, "body": json.dumps(body)}
    text = page.tab.evaluate("sent => fetch('/v1/chat/completions', sent).then(found => found.text())", sent)
    progress = json.loads(text.partition(": progress ")[2].partition("\n")[0])
    assert {*progress} == {"computed", "prompt", "waiting"} and progress["prompt"] > 50


def test_an_idle_page_is_quiet(page: Page) -> None:
    page.tab.wait_for_timeout(300)
    asked: list[str] = []
    page.tab.on("request", lambda request: asked.append(request.url))
    page.tab.wait_for_timeout(3000)
    assert len(asked) <= 1


def test_a_server_is_found_again(browser: Any) -> None:
    llm = load()
    context = browser.new_context()
    with serving(llm) as first:
        page = Page(context, first.url)
        page.open()
        port = int(first.url.rpartition(":")[2])
    page.tab.evaluate("window.dispatchEvent(new Event('focus'))")
    page.until("document.getElementById('connection').textContent === 'not connected'")
    assert "does not answer" in str(page.tab.text_content("#problem")) and port
    context.close()


def test_a_key_is_asked_for_once(browser: Any) -> None:
    with serving(load(), api_key=[KEY]) as keyed:
        context = browser.new_context()
        page = Page(context, keyed.url)
        page.tab.goto(keyed.url)
        page.tab.fill("#key", "wrong")
        page.tab.click("#key-dialog button[value=save]")
        page.until("document.querySelector('#key-reason').textContent.includes('wrong')")
        page.tab.wait_for_selector("#key-dialog[open]")
        page.tab.fill("#key", KEY)
        page.tab.click("#key-dialog button[value=save]")
        page.until("document.getElementById('connection').textContent === ''")
        page.set(max_tokens=3)
        page.ask("Hello")
        assert len(page.texts(".message")) == 2
        page.tab.reload()
        page.until("document.getElementById('connection').textContent === ''")
        assert page.tab.is_hidden("#key-dialog")
        assert page.tab.evaluate("localStorage.getItem('key')") is None
        page.tab.click("#tell")
        page.tab.click("#forget-key")
        page.tab.evaluate("sessionStorage.setItem('key', 'wrong')")
        page.tab.reload()
        page.tab.wait_for_selector("#key-dialog[open]")
        page.tab.keyboard.press("Escape")
        page.until("document.getElementById('problem').textContent.includes('asks for it again')")
        page.tab.evaluate("window.dispatchEvent(new Event('focus'))")
        page.tab.wait_for_timeout(300)
        assert page.tab.is_hidden("#key-dialog")
        page.tab.click("#tell")
        page.tab.wait_for_selector("#key-dialog[open]")
        page.tab.fill("#key", KEY)
        page.tab.check("#key-long")
        page.tab.click("#key-dialog button[value=save]")
        page.until("document.getElementById('connection').textContent === ''")
        assert page.tab.input_value("#key") == ""
        assert page.tab.evaluate("[sessionStorage.getItem('key'), localStorage.getItem('key')]") == [None, KEY]
        context.close()
        assert not page.problems


def test_storage_that_is_forbidden(browser: Any, served: Served) -> None:
    context = browser.new_context()
    page = Page(context, served.url)
    page.tab.add_init_script("indexedDB.open = () => { throw new DOMException('forbidden', 'SecurityError'); }")
    page.open()
    page.set(max_tokens=4)
    page.ask("Hello")
    assert len(page.texts(".message")) == 2 and page.texts(".line .state") == ["cut at 4 tokens"]
    assert any("keeps nothing" in each for each in page.texts(".notice"))
    context.close()
    assert not page.problems


def test_a_page_without_any_storage_starts(browser: Any, served: Served) -> None:
    context = browser.new_context()
    page = Page(context, served.url)
    page.tab.add_init_script("""for (const name of ["sessionStorage", "localStorage"])
        Object.defineProperty(window, name, {get() { throw new DOMException("blocked", "SecurityError"); }});""")
    page.open()
    page.tab.uncheck("#colours")
    page.answer_with([["Coloured", "one"]])
    page.ask("Hello")
    assert page.tab.is_enabled("#send") and not any(page.coloured()) and not page.tab.is_checked("#colours")
    context.close()
    assert not page.problems


def test_storage_that_is_full(page: Page, served: Served) -> None:
    session = page.tab.context.new_cdp_session(page.tab)
    session.send("Storage.overrideQuotaForOrigin", {"origin": served.url, "quotaSize": 1})
    page.answer_with(["Lost ", "text"])
    page.ask("Hello")
    page.until("document.querySelector('.notice')?.textContent.includes('its storage is full')")
    assert len(page.texts(".message")) == 2
    session.send("Storage.overrideQuotaForOrigin", {"origin": served.url})
    page.tab.keyboard.press("Control+k")
    page.ask("More")
    page.tab.reload()
    page.until("document.querySelectorAll('.message').length === 2")
    assert page.texts(".user .text") == ["More"] and not page.texts(".notice")


def test_another_version_of_the_server_is_told(page: Page) -> None:
    page.tab.route("**/version", lambda route: route.fulfill(json={"version": "99"}))
    page.tab.route("**/health", lambda route: route.abort())
    page.tab.evaluate("window.dispatchEvent(new Event('focus'))")
    page.until("document.getElementById('connection').textContent === 'not connected'")
    page.tab.unroute("**/health")
    page.tab.evaluate("window.dispatchEvent(new Event('focus'))")
    page.until("document.querySelector('.notice')?.textContent.includes('another version')")


def test_memory_stays(page: Page) -> None:
    page.set(max_tokens=40)
    page.ask("Begin")
    session = page.tab.context.new_cdp_session(page.tab)

    def used() -> int:
        session.send("HeapProfiler.collectGarbage")
        found: int = session.send("Runtime.getHeapUsage")["usedSize"]
        return found

    sizes = []
    begun = time.monotonic()
    for count in range(50):
        page.tab.keyboard.press("Control+k")
        page.tab.evaluate("history.replaceState(null, '', '/')")
        page.set(max_tokens=20) if count % 10 == 0 else None
        page.answer_with(["Some *text*, ", "and `more` ", "of it.\n\n"] * 20)
        page.ask(f"Question {count}")
        if count in (9, 29, 49):
            sizes.append(used())
    print(f"heap after 10, 30 and 50 answers: {[size >> 10 for size in sizes]} KiB; {time.monotonic() - begun:.0f} s")
    assert sizes[2] - sizes[1] < 2 << 20
