"""`forerun bench serve`: its flags, and what it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.cli.bench.serve import BenchServeOptions, OwnServer
from forerun.lab.bench.serve.load import Load
from forerun.lab.results.files import load_results
from serving import Served, fake_llm, serving

from .conftest import Invoke

PLENTY = ("--requests", "1", "--rounds", "2", "--max-tokens", "8", "--ignore-eos")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    llm = fake_llm()
    llm.target.before_forward = lambda _: time.sleep(0.003)  # type: ignore[attr-defined]  # whole answers that come at once have no times between
    with serving(llm, max_body=8) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    lines = [{"prompt": f"def f{i}():"} for i in range(3)] + [{"messages": [{"role": "user", "content": "hi"}]}]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def test_a_server_is_measured(served: Served, prompts: str, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    arguments = ("--url", f"it={served.url}", "--plain")
    arguments += ("--prompts", prompts, "--concurrency", "1,3", "--goodput", "first:60000,token:60000")
    done = invoke("bench", "serve", *arguments, *PLENTY, "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "over plain" in done.stdout and "3 at once, it, plain" in done.stdout
    results = load_results(file)
    assert results.kind == "serve" and results.settings["loads"] == ["1 at once", "3 at once"]
    assert len(results.prompts) == 4 and all(prompt.num_tokens for prompt in results.prompts)
    assert len(results.rows) == 2 * 2 * (8 + 8) and all(row.same_text is not False for row in results.rows)
    named = {figure.name for figure in results.figures}
    assert {"tokens_per_second", "over_plain", "goodput", "client_cpu"} <= named
    compared = invoke("bench", "compare", str(file), str(file), "--figures", "speed")
    assert compared.exit_code == 0 and "it, plain, 3 at once" in compared.stdout


def test_an_open_loop_alone(served: Served, prompts: str, invoke: Invoke) -> None:
    arguments = ("--url", served.url, "--prompts", prompts, "--rate", "200", "--requests", "5", "--rounds", "1")
    done = invoke("bench", "serve", *arguments, "--max-tokens", "4", "--json", "-")
    assert done.exit_code == 0, done.output
    written = json.loads(done.stdout)
    assert written["settings"]["loads"] == ["200 a second"] and len(written["rows"]) == 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "x", "--url", "x"), "the same name"),
        (("--url", "localhost:8000"), "must begin with http"),
        (("--url", "http://localhost:9", "--in-process"), "needs a MODEL"),
        (("--url", "http://localhost:9", "--drafter", "suffix"), "no MODEL"),
        (("--url", "http://localhost:9", "--quantize", "int8"), "no MODEL"),
        (("bundled", "--ask-for", "x"), "there is none"),
        (("bundled", "--concurrency", "0"), "whole numbers"),
        (("bundled", "--rate", "0"), "above 0"),
        (("bundled", "--goodput", "first"), "milliseconds"),
        (("bundled", "--goodput", "last:3"), "milliseconds"),
        (("--url", "http://127.0.0.1:9"), "gives no answer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_refused(arguments: tuple[str, ...], said: str, prompts: str, invoke: Invoke) -> None:
    done = invoke("bench", "serve", *arguments, "--prompts", prompts)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split()), done.output


def test_options_as_they_are_used() -> None:
    asked = BenchServeOptions(url=("http://a:1/v1", "b=http://c:2"), rate="0.5", goodput="whole:2000")
    assert asked.servers() == {"a:1/v1": "http://a:1/v1", "b": "http://c:2"}
    assert asked.loads() == [Load(rate=0.5)]
    assert [load.concurrency for load in BenchServeOptions().loads()] == [1, 4, 16]
    assert asked.goal() == {"seconds": 2.0} and not BenchServeOptions().goal()
    given = OwnServer("m", "suffix", "int8").arguments()
    assert given[:3] == ["m", "--drafter", "suffix"] and given[-2:] == ["--prefix-reuse", "off"]


@pytest.mark.slow
def test_a_server_is_started_and_compared_with_the_engine_inside(prompts: str, invoke: Invoke, tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    arguments = ("bundled", "--plain", "--in-process", "--concurrency", "1,2", "--prompts", "code")
    done = invoke("bench", "serve", *arguments, *PLENTY, "--json", str(file))
    assert done.exit_code == 0, done.output
    rows = load_results(file).rows
    assert {row.method for row in rows if "1 at once" in row.method} == {
        f"{place}{mode}, 1 at once" for place in ("forerun", "driver thread") for mode in ("", ", plain")
    }
    assert all(row.same_text is not False for row in rows)
