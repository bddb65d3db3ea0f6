"""The page's files, what they may load, and what the server tells it. `tests/browser` drives it in a browser."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path

import httpx
import pytest

import forerun.server
from serving import Served, until

FOLDER = Path(forerun.server.__file__).parent / "page"
MODULES = sorted(FOLDER.glob("*.js"))
OWN = [*MODULES, FOLDER / "index.html", FOLDER / "page.css"]


def test_the_files_are_served(http: httpx.Client) -> None:
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page/page.css", "page.css", "text/css"),
        ("/page/page.js", "page.js", "javascript"),
        ("/page/vendor/marked.js", "vendor/marked.js", "javascript"),
    ):
        found = http.get(path, params={"name": "../app.py"}, headers={"accept": "text/html,*/*;q=0.8"})
        assert found.content == (FOLDER / name).read_bytes() and kind in found.headers["content-type"]
        policy = found.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy
    for path in ("/page/", "/page/..%2fapp.py", "/page/vendor/versions.json", "/page/nothing.js"):
        assert http.get(path).status_code == 404


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    text = re.sub(r"^\s*(//|\*).*$|https\?:", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert not re.search(r"https?:|[\"'(]//\w|url\(|@import (?!\{)|\son\w+=\"|style=|innerHTML|eval\(", text)


def test_the_page_finds_its_elements_and_modules() -> None:
    page = (FOLDER / "index.html").read_text(encoding="utf-8")
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    for path in MODULES:
        script = path.read_text(encoding="utf-8")
        assert set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= ids
        assert all(
            (FOLDER / name).is_file() for name in re.findall(r'^import .* from "\./(.+)";$', script, re.MULTILINE)
        )
    assert set(re.findall(r'label for="([\w-]+)"', page)) <= ids


def test_imports_go_down_the_list_of_the_readme() -> None:
    listed = re.findall(r"^\| (`.*?) \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    order = [name for row in listed for name in re.findall(r"`(\w+\.js)`", row)]
    assert sorted(order) == [path.name for path in MODULES]
    for path in MODULES:
        script = path.read_text(encoding="utf-8")
        for name in re.findall(r'^import .* from "\./(\w+\.js)";$', script, re.MULTILINE):
            assert order.index(name) > order.index(path.name), f"{path.name} imports {name}"


def test_the_libraries_are_those_of_npm() -> None:
    noted = json.loads((FOLDER / "vendor" / "versions.json").read_text(encoding="utf-8"))
    sums = {name: digest for about in noted.values() for name, digest in about["sha256"].items()}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (FOLDER / "vendor").iterdir()}
    assert {name: digest for name, digest in found.items() if not name.endswith((".json", ".d.ts"))} == sums


def test_the_figures(http: httpx.Client, served: Served) -> None:
    now = http.get("/live").json()
    assert (
        now["max_batch"] == 4
        and now["running"] == now["waiting"] == 0
        and now["prompt_tokens_waiting"] == 0
        and "num_draft_tokens" in now["last_step"]
    )
    offers = [] if served.llm.drafter is None else [*served.llm.drafter.offers]
    assert http.get("/v1/models").json()["data"][0]["drafters"] == offers


def test_what_a_page_asks_again_and_again_is_not_logged(http: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    ids: set[str] = set()

    def told() -> list[str]:
        lines = [each.msg for each in caplog.records if isinstance(each.msg, dict)]
        return [line["path"] for line in lines if line.get("request_id") in ids]  # an earlier test's line may be late

    with caplog.at_level(logging.INFO, "forerun.server"):
        for path in ("/live", "/health", "/page/page.js", "/page/nothing.js", "/version"):
            ids.add(http.get(path).headers["x-request-id"])
        until(lambda: "/version" in told())  # a line is written after its response
    assert told() == ["/page/nothing.js", "/version"]


def test_a_stream_tells_who_drafted(http: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 40, "seed": 1, "stream": True, "n": 2, "ignore_eos": True}
    options = {"stream_options": {"include_drafts": True}}
    drafts: list[list[list[str | None]]] = [[], []]
    texts, accepted = ["", ""], 0
    for line in http.post("/v1/completions", json={**body, **options}).text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                drafts[choice["index"]] += choice["drafts"]
            accepted = (
                chunk.get("metrics", {}).get("speculative_decoding", {}).get("num_accepted_draft_tokens", accepted)
            )
    assert [len(each) for each in drafts] == [40, 40]
    assert sum(drafter is not None for each in drafts for _, drafter in each) == accepted
    assert ["".join(str(piece) for piece, _ in each) for each in drafts] == texts
