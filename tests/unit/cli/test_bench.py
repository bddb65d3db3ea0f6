"""The tables of `forerun bench`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import traffic_world
from fake_peers import fake_interpreter
from families import make_family
from forerun.cli.bench import agent, replay, shared
from forerun.errors import ConfigError
from forerun.kernels.cpu import native
from forerun.lab.bench import acceptance as acceptance_rate, forward as roofline, generate
from forerun.lab.bench.acceptance import AcceptanceRow
from forerun.lab.bench.compare import MethodRow
from forerun.lab.bench.measure import Interval
from forerun.lab.bench.peers import run as plan
from forerun.lab.bench.random_model import SHAPES, Shape
from forerun.lab.bench.tables import Table
from forerun.lab.results.files import load_results, save_results
from gguf_files import write_gguf
from gguf_models import tiny
from measured import QUIET, SUFFIX, beside_others, generated

from .conftest import Invoke


def test_whole_numbers() -> None:
    assert shared.whole_numbers("1, 5,8", "--rows") == [1, 5, 8]
    for text in ("", "1,x", "0", "1,-2", "5,5"):
        with pytest.raises(ConfigError, match="--rows"):
            shared.whole_numbers(text, "--rows")


def test_counts_and_temperatures() -> None:
    assert shared.draft_counts("auto, 4") == ["auto", 4]
    assert shared.non_negative("0,1.5", "--temperatures") == [0, 1.5]


def test_a_drafter_that_remembers_nothing_has_no_second_day(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(agent, "open_plain")
    drafters = "suffix,prompt-lookup"
    result = invoke("bench", "agent", "bundled", "--second-day", "--drafters", drafters)
    assert "--second-day is given, but prompt-lookup copies nothing from answers of the past" in result.output


def cells(module: ModuleType, row: object) -> list[str]:
    """The line of its table that a row makes."""
    (line,) = Table.of("", module.COLUMNS, [row]).rows
    return list(line)


def test_lines_of_the_tables() -> None:
    speed, over_plain, over_assisted = Interval(66.7, 60, 70), Interval(2, 1.9, 2.1), Interval(3, 2.5, 3.5)
    row = MethodRow("m", speed, over_plain, None, over_assisted, 2.5, None, 0.0214, None, [0.5], 0.9)
    line = cells(generate, row)
    assert line[:5] == ["m", "66.7 [60.0, 70.0]", "2.00 [1.90, 2.10]", "–", "3.00 [2.50, 3.50]"]
    assert line[5:] == ["2.50", "–", "21", "–", "90 %"]
    (steps,) = Table.of("", generate.STEP_COLUMNS, [replace(row, step=[10, 7, 2])]).rows
    assert steps == ["m", "10.00", "7.00", "2.00", "10 %"]
    line = cells(acceptance_rate, AcceptanceRow("code", "draft-model", 4, 1.0, 0.512, 3.04, "x", 5, (0.9, 0.75)))
    assert line == ["x", "5", "draft-model", "4", "1", "3.04", "0.512", ".90 .75"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["forward", "--rows", "0"],
        ["forward", "--rounds", "0"],
        ["forward", "--num-logits", "64", "--rows", "1,2"],  # the rows say how many
        ["generate", "--prompts", "no-such"],
        ["generate", "--num-prompts", "0"],
        ["peers"],
        ["peers", "--peer", "vllm=python"],
        ["peers", "--peer", "forerun=/none:model=m"],
        ["peers", "--peer", "transformers=/none", "--prompts", "no-such"],
        ["generate", "--num-draft-tokens", "a"],
        ["generate", "--num-draft-tokens", "auto,0"],
        ["generate", "--temperatures", "-1"],
        ["generate", "--assisted", "x"],
        ["replay", "--prompts", "no-such"],
        ["generate", "--drafters", "no-such"],
    ],
)
def test_bad_options_exit_with_2(invoke: Invoke, arguments: list[str]) -> None:
    assert invoke("bench", *arguments).exit_code == 2


def test_random_models_are_named_by_their_shape(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke("bench", "forward", "--model", "random:nothing")
    assert result.exit_code == 2 and "llama-1b, qwen3-4b" in result.stderr
    monkeypatch.setattr(roofline, "READ_MIB", 1)
    monkeypatch.setitem(SHAPES, "tiny", Shape("llama", 64, 1, 2, 1, 32, 64, 300))
    few = ["--dtypes", "int4", "--rows", "1,65", "--rounds", "1"]
    result = invoke("bench", "forward", "--model", "random:tiny", *few)
    assert result.exit_code == 0 and "over 64 rows with one row of logits" in result.stdout, result.stderr
    assert "weights MB" in result.stdout and "transformers," not in result.stdout
    found = json.loads(invoke("bench", "forward", "--model", "random:tiny", "--json", "-", *few).stdout)
    assert found["target"]["name"] == "random:tiny" and found["target"]["random_weights"] is True


def test_forwards_are_of_the_weights_as_the_file_has_them(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if native() is None:
        pytest.skip("there are no native kernels here")
    monkeypatch.setattr(roofline, "READ_MIB", 1)
    file = tmp_path / "file.gguf"
    write_gguf(file, tiny("llama"), "Q8_0")
    few = ["bench", "forward", "--model", str(file), "--rows", "1", "--rounds", "1"]
    for dtypes in ([], ["--dtypes", "Q8_0"]):
        found = json.loads(invoke(*few, "--json", "-", *dtypes).stdout)
        assert found["target"]["number_format"] == "Q8_0"
        assert {figure["labels"]["dtype"] for figure in found["figures"]} == {"Q8_0"}
    refused = invoke(*few, "--dtypes", "Q4_K_M")
    assert refused.exit_code == 2
    assert "--dtypes has 'Q4_K_M', but the weights of file.gguf are stored as Q8_0. Give 'stored'" in refused.stderr


def test_a_replay_says_what_it_measured(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ROUNDS", 1)
    monkeypatch.setattr(replay, "COUNTS", (2,))
    few = ["--drafters", "prompt-lookup", "--prompts", "high-temperature"]
    few += ["--num-prompts", "1", "--max-tokens", "8"]
    found = json.loads(invoke("bench", "replay", "--json", "-", *few).stdout)
    assert found["settings"]["cost_of"] == found["target"]["name"] == "bundled" and len(found["prompts"]) == 1


QUICK = ["--drafters", "prompt-lookup", "--no-reference", "--no-details", "--max-tokens", "8"]


def test_generate_on_a_file_of_prompts(invoke: Invoke, tmp_path: Path) -> None:
    lines = [{"prompt": "import os", "category": "x"}, {"prompt": "def f(", "category": "y"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--prompts", str(tmp_path / "mine.jsonl"), *QUICK]
    result = invoke("bench", "generate", "--json", str(tmp_path / "r.json"), *arguments)
    assert result.exit_code == 0, result.stderr
    assert "2 prompts of 8 tokens, past any end of text" in result.stdout
    assert "mine.jsonl, greedy, x" in result.stdout and "mine.jsonl, greedy, y" in result.stdout
    found = load_results(tmp_path / "r.json")
    assert [prompt.category for prompt in found.prompts] == ["x", "y"] and found.prompts[0].workload == "mine.jsonl"
    assert {row.method for row in found.rows} == {"forerun, plain", "forerun, prompt-lookup, auto"}
    assert all(row.num_tokens == 8 and row.same_text for row in found.rows)
    assert str(tmp_path) not in (tmp_path / "r.json").read_text()
    assert found.settings["stop_at_eos"] == []
    changed = json.loads((tmp_path / "r.json").read_text())
    changed["settings"]["stop_at_eos"] = ["mine.jsonl"]
    (tmp_path / "new.json").write_text(json.dumps(changed))
    compared = invoke("bench", "compare", str(tmp_path / "r.json"), str(tmp_path / "new.json"))
    assert "stop_at_eos was none and is ['mine.jsonl']" in compared.stderr
    (tmp_path / "r.json").write_text("{}")
    again = invoke("bench", "generate", "--json", str(tmp_path / "r.json"), *arguments[:2], *QUICK)
    assert again.exit_code == 2 and "holds no results that could be replaced" in again.stderr


def test_other_measurements_write_the_same_schema(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roofline, "READ_MIB", 1)
    model = str(make_family("llama", tmp_path / "model"))
    few = ["--num-prompts", "1", "--max-tokens", "4", "--model", "bundled-draft"]
    measured = [
        ["forward", "--model", model, "--dtypes", "float32", "--rows", "1,2", "--rounds", "1"],
        ["acceptance", "--prompts", "code", "--drafters", "suffix", *few],
    ]
    files = []
    for command in measured:
        files.append(str(tmp_path / f"{command[0]}.json"))
        result = invoke("bench", *command, "--json", files[-1])
        assert result.exit_code == 0, result.stderr
        found = load_results(files[-1])
        assert found.kind == command[0] and found.tables and found.figures
        assert all(each.value is not None for each in found.figures)
    result = invoke("bench", "report", *files, "--markdown", "-", "--json", str(tmp_path / "all.json"))
    assert result.exit_code == 0 and result.stdout.count("\n## ") == 1
    assert "roofline" in (tmp_path / "all.json").read_text()


def test_compare_fails_where_something_is_worse(invoke: Invoke, tmp_path: Path) -> None:
    save_results(generated(), tmp_path / "old.json")
    save_results(generated(slower={SUFFIX: 1.3}), tmp_path / "new.json")
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    result = invoke("bench", "compare", old, new)
    assert result.exit_code == 1 and "Worse: " in result.stdout
    result = invoke("bench", "compare", old, old)
    assert result.exit_code == 0 and "Not worse: 4 same" in result.stdout
    found = json.loads(invoke("bench", "compare", old, new, "--json", "--figures", "acceptance").stdout)
    assert found["worse"] is False and found["verdicts"] == {"same": 1}
    assert invoke("bench", "compare", old, new, "--figures", "beauty").exit_code == 2
    save_results(generated(3, slower={SUFFIX: 1.3}), tmp_path / "few.json")
    result = invoke("bench", "compare", str(tmp_path / "few.json"), new)
    assert result.exit_code == 0 and "Inconclusive: " in result.stdout


def test_a_journal_is_reported_as_results_are(invoke: Invoke, tmp_path: Path) -> None:
    file = str(traffic_world.written(tmp_path / "j"))
    result = invoke("bench", "report", file)
    assert result.exit_code == 0 and result.stdout.startswith("## Traffic of a server: bundled"), result.stderr
    assert invoke("bench", "report", file, "--json", str(tmp_path / "j.json")).exit_code == 0
    found = json.loads((tmp_path / "j.json").read_text())
    assert found["results"][0]["kind"] == "journal" and found["results"][0]["figures"]
    assert invoke("bench", "report", str(tmp_path / "none")).exit_code == 2


def test_pictures_of_results(invoke: Invoke, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_results(generated(), tmp_path / "new.json")
    result = invoke("bench", "report", str(tmp_path / "new.json"), "--pictures", str(tmp_path / "p" / "q"))
    assert result.exit_code == 0 and not result.stdout, result.output
    (picture,) = (tmp_path / "p" / "q").iterdir()
    assert picture.name == "new-over_plain-workload-mine.jsonl-temperature-0.0.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and "1 pictures are in" in result.stderr
    (tmp_path / "file").touch()
    refused = invoke("bench", "report", str(tmp_path / "new.json"), "--pictures", str(tmp_path / "file"))
    assert refused.exit_code == 2 and "--pictures is" in refused.stderr


def test_the_main_figures_are_put_between_marks(invoke: Invoke, tmp_path: Path) -> None:
    save_results(beside_others(), tmp_path / "new.json")
    page = tmp_path / "page.md"
    marks = "<!-- figures: engines, made by make report -->\nold\n<!-- end of figures -->"
    page.write_text(f"# Mine\n\n{marks}\n\nBelow.\n")
    for _ in range(2):
        assert invoke("bench", "report", str(tmp_path / "new.json"), "--into", str(page)).exit_code == 0
        text = page.read_text()
        assert text.startswith("# Mine\n") and text.endswith("\n\nBelow.\n") and "old" not in text
        assert (
            "| m, forerun Q4_K_M | 20.0 [19.0, 21.0] | 40.0 [39.0, 41.0], suffix | 100 [90, 110] | identical |" in text
        )
        theirs = "10.0 [9.0, 11.0] | 15.0 [14.0, 16.0], draft model | 200 [190, 210] | 1 of 4; first 7 tokens |"
        assert f"| m, llama.cpp | {theirs}" in text
        assert "| m, openvino | left out: no such file | – | – | – |" in text
        assert f"forerun 1; llama.cpp b1; {QUIET.processor}, {QUIET.threads} threads, " in text
    for content, reason in (("", "none of the lines"), (marks * 2, "once"), (marks[:50], "once")):
        page.write_text(content)
        refused = invoke("bench", "report", str(tmp_path / "new.json"), "--into", str(page))
        assert refused.exit_code == 2 and reason in refused.stderr and page.read_text() == content


def test_reports_of_files_that_are_none(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"machine": {}}')
    for command in (["report"], ["compare", str(tmp_path / "x.json")]):
        result = invoke("bench", *command, str(tmp_path / "x.json"))
        assert result.exit_code == 2 and "holds no results of forerun's" in result.stderr


def test_chats_are_refused_by_name_where_the_model_has_no_template(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"id": "q1", "turns": ["confidential"]}')
    for command in (["generate", *QUICK], ["replay", "--drafters", "suffix"]):
        result = invoke("bench", *command, "--prompts", str(tmp_path / "chat.jsonl"))
        assert result.exit_code == 2
        assert "q1 is a chat" in result.stderr and "confidential" not in result.output


def test_peers_from_flags_to_the_report(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = fake_interpreter(tmp_path), fake_interpreter(tmp_path, seconds=0.5)
    bad = fake_interpreter(tmp_path, "exits at start")
    start = plan.own_start
    monkeypatch.setattr(plan, "own_start", lambda *args: replace(start(*args), command=[str(own)]))
    peers = ["--peer", f"transformers={other}:name=other", "--peer", f"transformers={bad}:name=bad"]
    few = ["--num-prompts", "2", "--max-tokens", "6", "--threads", "1"]
    result = invoke("bench", "peers", "--json", "-", *peers, *few)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["details"]
    assert [peer["name"] for peer in found["peers"]] == ["forerun bfloat16", "other"]
    (whole,) = found["classes"]
    assert whole["reference"] == "forerun bfloat16, plain"
    assert [row["method"] for row in whole["rows"]] == ["plain", "prompt lookup"] * 2
    assert found["left_out"] == [{"peer": "bad", "reason": "it ended with exit code 1: no such library"}]
    assert "going on without bad" in result.stderr
    monkeypatch.setattr(plan, "own_start", lambda *args: replace(start(*args), command=[str(bad)]))
    result = invoke("bench", "peers", *peers, *few)
    assert result.exit_code == 2 and "forerun itself cannot take part" in result.stderr


def test_a_configuration_file_starts_no_peer(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[bench.peers]\npeer = ["transformers=/bin/sh"]\n')
    result = invoke("--config", str(tmp_path / "c.toml"), "bench", "peers")
    assert result.exit_code == 2 and "which would run a program" in result.stderr


@pytest.mark.slow
def test_transformers_beside_forerun(invoke: Invoke) -> None:
    arguments = ["--peer", f"transformers={sys.executable}", "--dtype", "float32", "--drafters", "suffix"]
    few = ["--num-prompts", "2", "--max-tokens", "24", "--threads", "1"]
    result = invoke("bench", "peers", "--json", "-", *arguments, *few)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)["details"]
    assert found["left_out"] == []
    rows = {(row["peer"], row["method"]): row for row in found["classes"][0]["rows"]}
    assert len(rows) == 4
    assert all(row["same_text"] == 1 for row in rows.values())
    assert rows["transformers float32", "plain"]["shared_prefix"] > 4


def test_acceptance_is_told_by_category_and_position(invoke: Invoke, tmp_path: Path) -> None:
    """Drafts of the bundled pair, of prompts in two categories; then of one category, which is told once."""
    lines = [{"prompt": f"def f{i}(x):\n    return", "category": "ab"[i % 2]} for i in range(3)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = ["--model", "bundled", "--drafters", "draft-model", "--prompts", str(prompts), "--max-tokens", "24"]
    found = json.loads(invoke("bench", "acceptance", "--json", "-", "--num-draft-tokens", "2,3", *few).stdout)[
        "figures"
    ]
    found = [
        {**each, **each["labels"]}
        for each in found
        if each["name"] == "acceptance_length" or each["labels"].get("position") == 1
    ]
    positions = [
        row["num_draft_tokens"] for row in found if row["name"] == "position_acceptance" and not row["category"]
    ]
    found = [row for row in found if row["name"] == "acceptance_length"]
    assert [(row["category"], row["samples"], row["num_draft_tokens"]) for row in found] == [
        (category, count, k) for k in (2, 3) for category, count in (("", 3), ("a", 2), ("b", 1))
    ]
    assert all(1 < row["value"] <= row["num_draft_tokens"] + 1 for row in found)
    assert positions == [2, 3]
    prompts.write_text(json.dumps(lines[0]) + "\n")
    text = invoke("bench", "acceptance", *few).stdout
    assert text.count("draft-model") == 1 and re.search(r"^all +1 ", text, re.MULTILINE)
    assert invoke("bench", "acceptance", "--num-draft-tokens", "auto", *few).exit_code == 2
