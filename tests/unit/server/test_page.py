"""The playground's files, what they ask the server, and the figures that they show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest

import forerun.server
from serving import Served

FOLDER = Path(forerun.server.__file__).parent / "page"


def test_the_files_are_served(http: httpx.Client) -> None:
    for path, name, kind in (
        ("/", "index.html", "text/html"),
        ("/page.css", "page.css", "text/css"),
        ("/page.js", "page.js", "javascript"),
    ):
        found = http.get(path, params={"name": "../app.py"}, headers={"accept": "text/html,*/*;q=0.8"})
        assert found.content == (FOLDER / name).read_bytes() and kind in found.headers["content-type"]
        assert "default-src 'self'" in found.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["index.html", "page.css", "page.js"])
def test_nothing_comes_from_elsewhere(name: str) -> None:
    assert not re.search(r"https?:|//\w|url\(|@import|\son\w+=|style=", (FOLDER / name).read_text(encoding="utf-8"))


def test_the_page_finds_its_elements() -> None:
    page, script = ((FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", "page.js"))
    ids = set(re.findall(r'\bid="([\w-]+)"', page))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= ids
    assert set(re.findall(r'label for="(\w+)"', page)) <= ids


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
