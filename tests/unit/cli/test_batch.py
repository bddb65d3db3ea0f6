"""`forerun batch`: files in, files out, and how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM, SamplingParams
from forerun.server.batch.run import BatchRun
from small_tokenizers import byte_level

TOKENIZER = byte_level()


def line(custom_id: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


REQUESTS = [line(f"{i}", prompt=[1, 2, i], seed=i, max_tokens=5) for i in range(9)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What models were opened with; all of them are a fake."""
    made: list[dict[str, Any]] = []

    def open_llm(model: str, drafter: str, **settings: Any) -> LLM:
        made.append({"model": model, "drafter": drafter, **settings})
        fake: Any = FakeModel(vocab_size=len(TOKENIZER))
        return LLM(fake, None, tokenizer=TOKENIZER, max_batch=settings["max_batch"])

    monkeypatch.setattr("forerun.cli.batch.open_llm", open_llm)
    return made


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "in.jsonl").write_text("\n".join(REQUESTS))
    return str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")


def test_from_file_to_file(invoke: Any, opened: list[dict[str, Any]], files: tuple[str, str]) -> None:
    result = invoke("batch", *files, "--model", "bundled", "--max-batch", "3", "--draft-model", "a/b")
    assert result.exit_code == 0, result.output
    assert "9 of 9 requests" in result.stderr and "45 tokens" in result.stderr
    answers = [json.loads(text) for text in Path(files[1]).read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [f"{i}" for i in range(9)]
    fake: Any = FakeModel(vocab_size=len(TOKENIZER))
    alone = LLM(fake, None, tokenizer=TOKENIZER)
    for i, answer in enumerate(answers):
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        assert body["model"] == "bundled"
        assert body["choices"][0]["text"] == alone.generate([1, 2, i], SamplingParams(seed=i, max_tokens=5)).text
    assert [each["drafter"] for each in opened] == ["hybrid:sources=suffix+a/b"] and opened[0]["max_batch"] == 3
    assert sorted(path.name for path in Path(files[1]).parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_ctrl_c_says_how_to_go_on_and_a_second_start_does(
    invoke: Any, opened: list[dict[str, Any]], files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(files[1])
    assert invoke("batch", *files, "--model", "bundled").exit_code == 0
    whole = out.read_bytes()
    out.unlink()
    answers = BatchRun.answers

    def interrupted(self: BatchRun, requests: Any) -> Any:
        for (index, answer), left in zip(answers(self, requests), range(4)):
            yield index, answer
            if left == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BatchRun, "answers", interrupted)
        result = invoke("batch", *files, "--model", "bundled")
    assert result.exit_code == 130
    assert "stopped after 4 of 9 requests" in result.stderr and "the same command goes on" in result.stderr
    assert not out.exists()

    result = invoke("batch", *files, "--model", "bundled", "--seed", "3")
    assert result.exit_code == 2 and "seed was None and is 3" in result.stderr
    result = invoke("batch", *files, "--model", "bundled", "--max-batch", "2")
    assert result.exit_code == 0 and "4 of 9 requests are answered already" in result.stderr
    assert out.read_bytes() == whole


def test_nothing_is_overwritten_unasked(invoke: Any, opened: list[dict[str, Any]], files: tuple[str, str]) -> None:
    Path(files[1]).write_text("precious")
    result = invoke("batch", *files, "--model", "bundled")
    assert result.exit_code == 2 and "exists" in result.stderr and not opened
    assert Path(files[1]).read_text() == "precious"
    result = invoke("batch", files[0], files[0], "--model", "bundled", "--force")
    assert result.exit_code == 2 and "holds the requests themselves" in result.stderr
    for beside in (".broken", ".journal"):  # what a run writes or removes itself
        source = Path(files[1] + beside)
        source.write_bytes(Path(files[0]).read_bytes())
        result = invoke("batch", str(source), files[1], "--model", "bundled", "--force")
        assert result.exit_code == 2 and "holds the requests themselves" in result.stderr and source.exists()
        source.unlink()
    assert invoke("batch", *files, "--model", "bundled", "--force").exit_code == 0
    assert len(Path(files[1]).read_text().splitlines()) == 9


def test_a_seed_for_requests_without_one(invoke: Any, opened: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n".join(line(f"{i}", prompt=[1, 2], max_tokens=8) for i in range(6)))
    for out in ("a", "b"):
        assert invoke("batch", str(tmp_path / "in"), str(tmp_path / out), "--model", "m", "--seed", "5").exit_code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    answers = [json.loads(text) for text in (tmp_path / "a").read_text().splitlines()]
    assert len({answer["response"]["body"]["choices"][0]["text"] for answer in answers}) > 1


def test_the_name_that_requests_use(invoke: Any, opened: list[dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "in").write_text(line("a", prompt=[1], model="gpt") + "\n" + line("b", prompt=[1], model="bundled"))
    arguments = ("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--model", "bundled")
    assert invoke(*arguments, "--served-model-name", "gpt").exit_code == 0
    answers = [json.loads(text)["response"] for text in (tmp_path / "out").read_text().splitlines()]
    assert [answer["status_code"] for answer in answers] == [200, 404]
    assert answers[0]["body"]["model"] == "gpt"


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """Real processes, the bundled pair, SIGKILL after some answers."""
    prompts = ["def f(x):\n", "import os\n", "class A:\n", "x = "]
    requests = [line(f"{i}", prompt=prompts[i % 4], seed=i, max_tokens=24, n=1 + i % 2) for i in range(40)]
    (tmp_path / "in").write_text("\n".join(requests))

    def start(out: str) -> subprocess.Popen[bytes]:
        arguments = ["batch", str(tmp_path / "in"), str(tmp_path / out), "--model", "bundled", "--max-batch", "4"]
        return subprocess.Popen([sys.executable, "-m", "forerun", *arguments], stderr=subprocess.DEVNULL)

    undisturbed = start("undisturbed")
    assert undisturbed.wait(240) == 0
    journal, lengths = tmp_path / "out.journal", [0]
    for num_answers in (1, 15):
        with start("out") as process:
            deadline = time.monotonic() + 240
            while not journal.exists() or journal.read_bytes().count(b"\n") <= lengths[-1] + num_answers:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGKILL)
        assert not (tmp_path / "out").exists()
        lengths.append(journal.read_bytes().count(b"\n"))
    last = start("out")
    assert last.wait(240) == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "undisturbed").read_bytes()
    assert not journal.exists()


def test_a_chat_template_of_a_file(
    invoke: Any, opened: list[dict[str, Any]], files: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "it.jinja").write_text("{{ messages }}")
    result = invoke("batch", *files, "--model", "bundled", "--chat-template", str(tmp_path / "it.jinja"))
    assert result.exit_code == 0 and opened[-1]["chat_template"] == "{{ messages }}"
