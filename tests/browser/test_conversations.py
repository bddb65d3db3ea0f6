"""Conversations: asking, stopping, going on, branches, what is kept, and figures that belong to their answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from browser.conftest import NARROW, WIDE, Page, bodies
from mixed_requests import COMPLETIONS
from serving import LIMIT, Served

pytestmark = pytest.mark.slow

SHOWN = ".message.assistant .text"
DRAFTS = """() => new Promise((resolve) => {
    indexedDB.open("forerun").onsuccess = ({target}) => {
        const request = target.result.transaction("messages").objectStore("messages").getAll();
        request.onsuccess = () => resolve(request.result.find((each) => each.drafts).drafts);
    };
})"""


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_answer_and_the_box_are_in_sight(page: Page, size: tuple[int, int]) -> None:
    page.tab.set_viewport_size(dict(zip(("width", "height"), size)))
    page.set(max_tokens=80, seed=3)
    for text in ("Write a loop.", "And another.", "A third one."):
        page.tab.mouse.move(size[0] // 2 + 100, 200)
        page.tab.mouse.wheel(0, -200)
        page.tab.wait_for_timeout(100)
        page.ask(text)
        assert page.inside(".message:last-child .actions") and page.inside("#input")
    assert page.tab.evaluate("document.documentElement.scrollHeight <= innerHeight")


def test_the_text_is_that_of_the_server_and_drafts_are_coloured(page: Page, served: Served) -> None:
    prompt = "def quicksort(items):"
    page.set(mode="text", max_tokens=60, seed=3, temperature=0.7)
    page.ask(prompt)
    body = {"prompt": prompt, "max_tokens": 60, "seed": 3, "temperature": 0.7}
    text = httpx.post(served.url + COMPLETIONS, json=body, timeout=LIMIT).json()["choices"][0]["text"]
    assert page.texts(SHOWN) == [text]
    drafts = page.tab.evaluate(DRAFTS)
    assert "".join(piece for piece, _ in drafts) == text
    drafted = sorted(piece for piece, drafter in drafts if drafter)
    assert drafted and sorted(each for colour in page.coloured() for each in colour) == drafted
    page.tab.uncheck("#colours")
    assert not any(page.coloured())


def test_colours_stand_in_markdown(page: Page) -> None:
    pieces = [("Some ", None), ("*em", "one"), ("phasis*", None), (" [and](https://a.b) `co", "two"), ("de`", None)]
    code = [("\n\n```py\n", None), ("x = ", "one"), ("1\n", None), ("```\n", "two"), ("- **en", None), ("d**", "two")]
    page.answer_with([*pieces, *code])
    page.ask("Colour it")
    one, two = page.coloured()
    assert one == ["em", "x = "] and [each for each in two if each != "\n"] == [" ", "and", " ", "co", "d"]


def test_a_new_conversation_during_an_answer(page: Page) -> None:
    sent = bodies(page)
    page.answer_with(["one ", "two ", "three"], hold=True)
    page.begin("First question")
    page.until("window.asked.length === 1")
    page.tab.evaluate("window.more()")
    page.tab.keyboard.press("Control+k")
    page.until("!document.querySelector('.message') && !document.getElementById('send').disabled")
    page.tab.evaluate("window.held = window.more; window.fetch = window.original")
    page.set(max_tokens=5)
    page.ask("Second question")
    assert [each["content"] for each in sent[-1]["messages"]] == ["Second question"]
    page.tab.evaluate("window.held(); window.held(); window.held(); window.held()")
    page.tab.click("#list a:has-text('First question')")
    page.until("document.querySelector('.message.assistant .text')?.textContent.trim() === 'one two three'")
    page.until("document.querySelectorAll('#list a').length === 2")


def test_it_says_how_an_answer_ended(page: Page) -> None:
    page.set(max_tokens=12, seed=1)
    page.ask("Count.")
    assert page.texts(".line .state") == ["cut at 12 tokens"]
    figures = page.texts(".line")
    page.answer_with(["piece "] * 3, hold=True)
    page.begin("Go on")
    page.until("window.asked.length === 1")
    for _ in range(2):
        page.tab.evaluate("window.more()")
    page.until("document.querySelector('.message:last-child .text').textContent.includes('piece piece')")
    page.tab.keyboard.press("Escape")
    page.ended()
    assert page.texts(".line .state") == ["cut at 12 tokens", "stopped by you"]
    assert page.texts(".line")[0] == figures[0] and "2 tokens" in page.texts(".line")[1]


def test_an_answer_goes_on(page: Page, served: Served) -> None:
    page.set(max_tokens=10, seed=5)
    sent = bodies(page)
    page.ask("Write a class.")
    first, prompt = page.texts(SHOWN)[0], page.texts(".more dd")[0].partition(",")[0]
    page.act("Continue")
    page.ended()
    assert sent[-1]["continue_final_message"] and sent[-1]["messages"][-1]["role"] == "assistant"
    assert len(page.texts(SHOWN)) == 1 and len(page.texts(SHOWN)[0]) > len(first)
    assert "20 tokens" in page.texts(".line")[0]
    assert page.texts(".more dd")[0].partition(",")[0] == prompt


def test_versions_stay_beside_each_other(page: Page) -> None:
    page.set(max_tokens=8)
    page.ask("One")
    page.act("Again")
    page.ended()
    assert "2 of 2" in page.texts(".assistant .actions")[0]
    page.act("‹")
    assert "1 of 2" in page.texts(".assistant .actions")[0]
    page.tab.focus("#input")
    page.tab.keyboard.press("ArrowUp")
    page.tab.keyboard.type(" more")
    page.tab.keyboard.press("Enter")
    page.ended()
    assert page.texts(".user .text") == ["One more"] and "2 of 2" in page.texts(".user .actions")[0]
    page.act("‹", "user")
    assert page.texts(".user .text") == ["One"] and "1 of 2" in page.texts(".assistant .actions")[0]
    page.tab.reload()
    page.until("document.querySelector('.user .text')?.textContent === 'One'")


def test_conversations_outlive_a_reload(page: Page) -> None:
    page.set(max_tokens=8, system="Be brief.", temperature=0.3)
    page.ask("Something to keep")
    text = page.texts(SHOWN)
    page.tab.reload()
    page.until("document.querySelector('.message.assistant')")
    assert page.texts(SHOWN) == text and page.tab.text_content("#title") == "Something to keep"
    sent = bodies(page)
    page.until("!document.getElementById('send').disabled")
    page.ask("Again")
    assert sent[0]["messages"][0] == {"role": "system", "content": "Be brief."} and sent[0]["temperature"] == 0.3
    assert [each["role"] for each in sent[0]["messages"]] == ["system", "user", "assistant", "user"]


def test_a_default_is_for_all_conversations(page: Page, tabs: Callable[[], Page]) -> None:
    page.tab.click("#set")
    assert page.tab.get_attribute("#set-temperature", "placeholder") == "1"
    assert "otherwise" in str(page.tab.text_content("#set-temperature-about"))
    page.tab.fill("#set-system", "Speak plainly.")
    page.tab.fill("#set-max_tokens", "4")
    page.tab.check("#as-default")
    page.tab.click("#settings button[value=save]")
    page.tab.reload()
    page.until("!document.getElementById('send').disabled")
    sent = bodies(page)
    page.ask("Hello")
    assert sent[0]["messages"][0]["content"] == "Speak plainly." and sent[0]["max_tokens"] == 4
    other = tabs()
    page.tab.bring_to_front()
    page.tab.click("#set")
    page.tab.fill("#set-seed", "7")
    page.tab.check("#as-default")
    assert page.tab.input_value("#set-max_tokens") == "4" and page.tab.input_value("#set-seed") == "7"
    page.tab.fill("#set-system", "")
    page.tab.click("#settings button[value=save]")
    page.ask("Again")
    assert [each["role"] for each in sent[1]["messages"]] == ["user", "assistant", "user"] and sent[1]["seed"] == 7
    other.tab.bring_to_front()
    other.tab.click("#set")
    assert other.tab.get_attribute("#set-seed", "placeholder") == "7"


def test_a_default_that_the_server_does_not_have_is_left_out(page: Page) -> None:
    page.tab.route("**/health", lambda route: route.fulfill(json={"status": "ok", "cannot": {"response_format": "a"}}))
    page.tab.click("#set")
    page.tab.fill("#set-schema", "{")
    page.tab.check("#as-default")
    page.tab.click("#settings button[value=save]")
    page.tab.reload()
    page.until("!document.getElementById('send').disabled")
    page.answer_with(["Yes."])
    page.ask("Hello")
    assert page.texts(".line .state") == ["complete"]


def test_find_rename_delete_and_undo(page: Page, tabs: Callable[[], Page]) -> None:
    page.set(max_tokens=4)
    page.ask("Apples")
    page.tab.keyboard.press("Control+k")
    page.set(max_tokens=4)
    page.ask("Pears")
    page.tab.click("#menu summary")
    page.tab.click("#rename")
    page.tab.keyboard.type("Fruit")
    page.tab.keyboard.press("Enter")
    page.until("document.querySelector('#list a').textContent === 'Fruit'")
    page.tab.fill("#search", "apples")
    page.until("document.querySelectorAll('#list a').length === 1")
    assert page.texts("#list a") == ["Apples"]
    page.tab.fill("#search", "")
    page.until("document.querySelectorAll('#list a').length === 2")
    page.tab.click("#menu summary")
    page.tab.click("#delete")
    page.until("document.querySelectorAll('#list a').length === 1 && !document.querySelector('.message')")
    tabs()  # which may not take what can still be undone away
    page.tab.click(".notice button:has-text('Undo')")
    page.until("document.querySelectorAll('#list a').length === 2")
    assert page.texts(".user .text") == ["Pears"]
    page.tab.fill("#search", "pears")
    page.until("document.querySelectorAll('#list a').length === 1")
    assert page.texts("#list a") == ["Fruit"]


def test_what_another_tab_removed_is_not_made_anew(page: Page) -> None:
    page.answer_with(["Yes."])
    page.ask("Hello")
    page.tab.evaluate("""async () => {
        const {Store} = await import("/page/store.js");
        const store = new Store();
        await store.open();
        await store.remove(location.hash.slice(1));
        await store.change(location.hash.slice(1), {deleted: 0});
    }""")
    page.until("!document.querySelector('.message, #list a')")


def test_a_damaged_conversation_leaves_the_page_alive(page: Page) -> None:
    page.answer_with(["Yes."])
    page.ask("Hello")
    page.tab.evaluate("""async () => {
        const {Store} = await import("/page/store.js");
        const store = new Store();
        await store.open();
        const [message] = await store.messages.of(location.hash.slice(1));
        await store.messages.put({...message, files: "damaged"});
    }""")
    page.tab.reload()
    page.until("document.getElementById('problem').textContent.includes('cannot be shown')")
    page.until("!document.getElementById('send').disabled")
    page.answer_with(["Still here."])
    page.tab.keyboard.press("Control+k")
    page.ask("Hello")
    assert page.texts(".assistant .text")[0].strip() == "Still here."


@pytest.mark.parametrize("kind", ["json", "markdown"])
def test_export_and_import(page: Page, kind: str, tmp_path: Path) -> None:
    page.set(max_tokens=6, system="Be kind.")
    page.ask("A line\n<!-- user -->\nand another")
    texts = page.texts(".message .text")
    page.tab.click("#menu summary")
    with page.tab.expect_download() as loaded:
        page.tab.click(f"#export-{kind}")
    path = tmp_path / loaded.value.suggested_filename
    loaded.value.save_as(path)
    with page.tab.expect_file_chooser() as chosen:
        page.tab.click("#import")
    chosen.value.set_files(path)
    page.until("document.querySelectorAll('#list a').length === 2")
    page.until("document.querySelectorAll('.message').length === 2")
    assert page.texts(".message .text") == texts
    page.tab.click("#set")
    assert page.tab.input_value("#set-system") == "Be kind."
    page.tab.keyboard.press("Escape")


def damaged(**fields: object) -> str:
    """Return an export whose second message has wrong fields; both have one id where it has no other."""
    first = {"id": "a", "parent": "", "role": "user", "content": "Hello"}
    second = {"id": "a" if "parent" in fields else "b", "parent": "a", "role": "assistant", "content": "Yes"} | fields
    whole = [{"conversation": {"title": "a"}, "messages": [first, second]}]
    return json.dumps({"format": "forerun-conversations", "version": 1, "conversations": whole})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "damaged"),
        ("{}", "no conversations"),
        ('{"format": "forerun-conversations", "version": 9}', "version 9"),
        ('{"format": "forerun-conversations", "version": 1, "conversations": [{"conversation": {"title": "a"}}]}', "1"),
        ("# A text\n", "<!-- user -->"),
        (damaged(files="a"), "conversation 1 is not complete"),
        (damaged(figures={}), "conversation 1 is not complete"),
        (damaged(calls=[{"id": "a"}]), "conversation 1 is not complete"),
        (damaged(drafts=[["a"]]), "conversation 1 is not complete"),
        (damaged(parent="a"), "conversation 1 is not complete"),
    ],
)
def test_a_wrong_file_overwrites_nothing(page: Page, content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    page.tab.set_input_files("#import-file", path)
    page.until("!document.getElementById('problem').hidden")
    assert said in str(page.tab.text_content("#problem")) and page.texts("#list a") == []


def test_two_tabs_write_in_one_conversation(page: Page, tabs: Callable[[], Page]) -> None:
    page.set(max_tokens=6)
    page.ask("From the first tab")
    other = tabs()
    other.tab.click("#list a")
    other.until("document.querySelectorAll('.message').length === 2")
    other.ask("From the second")
    page.until("document.querySelectorAll('.message').length === 4")
    page.ask("The first again")
    other.until("document.querySelectorAll('.message').length === 6 && !document.querySelector('[aria-busy=true]')")
    assert page.texts(".user .text") == ["From the first tab", "From the second", "The first again"]
    assert other.texts(".user .text") == page.texts(".user .text")


def test_another_tab_sees_what_is_written(page: Page, tabs: Callable[[], Page]) -> None:
    page.answer_with(["One ", "two"], hold=True)
    page.begin("Write")
    page.until("window.asked.length === 1")
    page.tab.evaluate("window.more()")
    other = tabs()
    other.tab.click("#list a")
    other.until("document.querySelector('.line .state')?.textContent === 'being written in another tab…'")
    assert "Continue" not in other.texts(".assistant .actions")[0]
    page.tab.evaluate("window.more(), window.more()")
    page.ended()
    other.until("document.querySelector('.line .state').textContent === 'complete'")
    assert other.texts(SHOWN)[0].strip() == "One two"


def test_a_comparison_is_fair(page: Page) -> None:
    page.set(max_tokens=40, seed=2)
    page.ask("Write a function.")
    sent = bodies(page)
    page.act("Compare")
    page.until("document.querySelector('.comparison')?.textContent.includes('times:')")
    page.ended()
    assert len(sent) == 2 and len({each["cache_salt"] for each in sent}) == 2
    assert sent[0]["messages"] == sent[1]["messages"] and sent[0]["seed"] == sent[1]["seed"]
    assert sorted("speculative" in each for each in sent) == [False, True]
    told = page.texts(".comparison")[0]
    assert "The texts are the same." in told and "was first" in told


def test_json_by_a_schema(page: Page) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    page.set(schema=json.dumps(schema), max_tokens=200)
    page.ask("Give an object.")
    assert set(json.loads(page.texts(SHOWN)[0])) >= {"a"}
    page.set(schema="{")
    page.begin("Again")
    page.until("!document.getElementById('problem').hidden")
    assert "not JSON" in str(page.tab.text_content("#problem")) and page.tab.input_value("#input") == "Again"


def test_files_are_fenced_and_counted(page: Page, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n```\n")
    (tmp_path / "b.pdf").write_bytes(b"%PDF")
    (tmp_path / "c.png").write_bytes(b"\x89PNG")
    (tmp_path / "d.txt").write_bytes(b"\xff\xfe\x00")
    page.tab.set_input_files("#file", tmp_path / "a.py")
    page.until("document.querySelector('.chip')?.textContent.includes('tokens')")
    assert "of 512 tokens" in str(page.tab.text_content("#count")) or "of " in str(page.tab.text_content("#count"))
    for name, said in (("b.pdf", "PDF"), ("c.png", "image"), ("d.txt", "not text")):
        page.tab.set_input_files("#file", tmp_path / name)
        page.until(f"document.getElementById('problem').textContent.includes({json.dumps(said)})")
    page.set(max_tokens=3)
    sent = bodies(page)
    page.ask("Read it.")
    assert sent[0]["messages"][0]["content"] == "Read it.\n\nFile a.py:\n\n````py\nx = 1\n```\n````"
    assert page.texts(".file summary") == ["a.py · 10 characters"]


def test_a_file_is_dropped_and_taken_away(page: Page) -> None:
    page.tab.evaluate("""() => {
        const data = new DataTransfer();
        data.items.add(new File(["a = 1"], "dropped.py"));
        document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
    }""")
    page.until("document.querySelector('.chip')?.textContent.startsWith('dropped.py')")
    page.tab.click(".chip button")
    assert page.texts(".chip") == []


def test_thinking_can_be_switched_off(page: Page) -> None:
    page.tab.route("**/tokenizer_info", lambda route: route.fulfill(json={"chat_template": "{{ enable_thinking }}"}))
    page.tab.reload()
    page.until("!document.getElementById('send').disabled")
    page.answer_with(["Yes."])
    page.set(thinking="off")
    page.ask("Quickly")
    assert page.tab.evaluate("window.asked[0].chat_template_kwargs") == {"enable_thinking": False}


def test_a_large_paste_becomes_a_file(page: Page) -> None:
    page.tab.evaluate("""() => {
        const data = new DataTransfer();
        data.setData("text/plain", "word ".repeat(2_000_000));
        const event = new ClipboardEvent("paste", {clipboardData: data, cancelable: true, bubbles: true});
        document.getElementById("input").dispatchEvent(event);
    }""")
    page.until("document.querySelector('.chip.wrong')")
    assert page.tab.input_value("#input") == "" and "larger than" in page.texts(".chip")[0]
