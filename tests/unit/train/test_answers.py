"""Making answers: whatever a kill leaves, the file is the same; nobody's file is lost; prompts of every origin."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from doubles import FakeModel
from forerun import LLM
from forerun.engine import Choice
from forerun.engine.results import SequenceStats
from forerun.errors import ConfigError
from forerun.train.data import answer_stages, answers, passages
from forerun.train.data.answer_rows import pack_answers
from forerun.train.data.answers import make_answers
from forerun.train.data.passages import Passage, read_passages
from forerun.train.data.prompt_templates import KINDS, from_templates, prompt_fault
from forerun.train.defaults import AnswerMaking
from forerun.train.loop import StageProgress
from forerun.utils import workloads
from forerun.utils.files import locked
from forerun.utils.journal import Journal
from small_tokenizers import byte_level, ids_of

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPTIONS = AnswerMaking(max_tokens=10, max_batch=4)


@pytest.fixture(autouse=True)
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "target_fingerprint", lambda model: f"{model.name} {model.order}")


def opened(*, template: bool = False, order: int = 3) -> Callable[[], LLM]:
    def open_llm() -> LLM:
        tokenizer = byte_level()
        if template:
            tokenizer.chat_template = TEMPLATE
        eos = ids_of(tokenizer, "a", "e", "<|im_end|>")
        fake: Any = FakeModel(len(tokenizer), order=order, eos_token_ids=eos)
        return LLM(fake, None, tokenizer=tokenizer, num_draft_tokens=0, max_batch=OPTIONS.max_batch)

    return open_llm


def make(out: Path, data: list[Path], options: AnswerMaking = OPTIONS, **chosen: Any) -> list[dict[str, Any]]:
    force = chosen.pop("force", False)
    make_answers(opened(**chosen), out, data, options, Console(quiet=True), force=force)
    return lines(out)


def lines(path: Path) -> list[dict[str, Any]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.decode().splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Twenty prompts, some of them in two turns."""
    path = tmp_path / "prompts.jsonl"
    asked = [{"prompt": f"Say {n}.", "category": "say"} if n % 3 else {"turns": [f"{n}?", "Sure?"]} for n in range(20)]
    path.write_text("".join(json.dumps(each) + "\n" for each in asked))
    return path


def test_a_run_killed_anywhere_ends_with_the_same_file(
    tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(tmp_path / "whole.jsonl.gz", [prompts], template=True)
    assert {each["temp"] for each in expected} == {0.0, 1.0}
    assert not (tmp_path / "whole.jsonl.gz.run").exists()
    add = Journal.add
    for kept in (0, 1, 9, 20):

        def killed(journal: Journal, index: int, answer: Any, kept: int = kept) -> None:
            if journal.num_done == kept:
                raise SystemExit
            add(journal, index, answer)

        out = tmp_path / f"killed{kept}.jsonl.gz"
        monkeypatch.setattr(Journal, "add", killed)
        with pytest.raises(SystemExit):
            make(out, [prompts], template=True)
        monkeypatch.setattr(Journal, "add", add)
        journal = tmp_path / f"{out.name}.run" / "answers.journal"
        journal.write_bytes(journal.read_bytes()[:-7])  # within the last line
        assert not out.exists()
        make(out, [prompts], template=True)
        assert out.read_bytes() == (tmp_path / "whole.jsonl.gz").read_bytes()


def test_time_left_and_cut_answers_are_told(tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, float, int]] = []

    def show(self: StageProgress, done: int, detail: str = "", tokens: int = 0, *, begun: float = 0.0) -> None:
        shown.append((done, begun, tokens))

    monkeypatch.setattr(StageProgress, "show", show)
    console = Console(file=io.StringIO(), width=300)
    record = make_answers(opened(), tmp_path / "out.jsonl", [prompts], replace(OPTIONS, max_tokens=2), console)
    cut = record["answers"] - record["complete"]
    assert cut > answers.MANY_CUT * record["answers"]
    line = f"{cut} of {record['answers']} answers ({cut / record['answers']:.0%}) were cut after 2 tokens"
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert line in said and "--max-tokens 8 lets more of them end" in said
    assert any(done == 0 and 0 < begun <= OPTIONS.max_batch and tokens for done, begun, tokens in shown)
    assert shown == sorted(shown, key=lambda each: each[2]) and shown[-1][1] == 0
    quiet = Console(file=io.StringIO(), width=300)
    make_answers(opened(), tmp_path / "long.jsonl", [prompts], replace(OPTIONS, max_tokens=500), quiet)
    assert "were cut" not in quiet.file.getvalue()  # type: ignore[attr-defined]


def test_a_second_turn_is_asked_after_the_answer_to_the_first(tmp_path: Path, prompts: Path) -> None:
    made = make(tmp_path / "out.jsonl", [prompts], template=True)
    answered = {each["prompt"]: each["answer"] for each in made if "prompt" in each}
    chats = [each["messages"] for each in made if "messages" in each]
    assert len(chats) >= 3
    for first, answer, second in chats:
        assert first["content"].endswith("?") and second == {"role": "user", "content": "Sure?"}
        assert answer == {"role": "assistant", "content": answered[first["content"]]}


def test_the_same_run_is_kept_and_another_is_refused(tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out.jsonl"
    before = make(out, [prompts], template=True)
    inode = out.stat().st_ino
    assert make(out, [prompts], template=True) == before
    assert out.stat().st_ino == inode
    for other in ({"options": AnswerMaking(max_tokens=11)}, {"template": False}, {"template": True, "order": 2}):
        with pytest.raises(ConfigError, match="exists"):
            make(out, [prompts], **{"template": True, **other})  # type: ignore[arg-type]
    prompts.write_text('{"prompt": "Else?"}\n')
    with pytest.raises(ConfigError, match="exists"):
        make(out, [prompts], template=True)
    assert len(make(out, [prompts], template=True, force=True)) <= 1
    with locked(out, ConfigError, wait=False), pytest.raises(ConfigError, match="in use by another process"):
        make(out, [prompts], template=True)


def test_raw_targets_go_on_with_text_and_are_asked_no_chats(tmp_path: Path, prompts: Path) -> None:
    made = make(tmp_path / "out.jsonl", [prompts])
    assert made and all(each["text"].startswith("Say ") for each in made)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "long.py").write_text("".join(f"x{n} = {n}\n" for n in range(300)))
    cut = make(tmp_path / "cut.jsonl", [folder], AnswerMaking(answers=1, max_tokens=10))
    assert [each["kind"] for each in cut] == ["text"] and "\n" in cut[0]["text"]
    with pytest.raises(ConfigError, match="no chat template"):
        make(tmp_path / "mixed.jsonl", [prompts], AnswerMaking(mixture_share=0.5))


def test_prompts_for_evaluation_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    question = next(
        case for case in workloads.load_workload("questions") if len(case.messages[0]["content"].split()) > 15
    )
    path.write_text(json.dumps({"prompt": question.messages[0]["content"]}) + '\n{"prompt": "Say it."}\n')
    made = make(tmp_path / "out.jsonl", [path], template=True)
    assert [each["prompt"] for each in made] == ["Say it."]
    both = make(tmp_path / "both.jsonl", [path], AnswerMaking(max_tokens=10, keep_overlap=True), template=True)
    assert len(both) == 2


def test_bad_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for content, message in (
        ('{"prompt": "a"}\n{"prompt": ', r"prompts\.jsonl:2: it is not JSON"),
        ("", "holds no prompts"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            make(tmp_path / "out.jsonl", [path], template=True)
    with pytest.raises(ConfigError, match="must end in"):
        make(tmp_path / "out.txt", [path])
    with pytest.raises(ConfigError, match="There is no kind of prompts 'cooking'"):
        from_templates([Passage("a")], [], ["cooking"], 1, 0)


def test_the_target_writes_prompts_of_which_usable_ones_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(5):
        body = f"def function_{number}(value):\n    value += {number}\n    value *= 2\n    return value\n"
        (library / f"module{number}.py").write_text(body)
    asked: list[str] = []
    compute = answer_stages.compute

    def written(llm: LLM, waiting: Any, request: Any, stepped: Any) -> Iterator[Any]:
        if request.__name__ != "_writing_request":
            yield from compute(llm, waiting, request, stepped)
            return
        while waiting:
            place = waiting.popleft()
            ids, params = request(place)
            asked.append(llm.tokenizer.decode(ids))
            assert params.seed is not None
            text = f"What is the {place % 7}th of all the numbers?" if place % 2 else "the the the the the the the"
            yield place, Choice(0, text, [1], None, "length" if place % 5 == 0 else "stop", SequenceStats())

    monkeypatch.setattr(answer_stages, "compute", written)
    monkeypatch.setattr(passages, "standard_library_root", lambda: library)
    made = make(tmp_path / "out.jsonl", [], AnswerMaking(answers=8, max_tokens=10, mixture_share=0.25), template=True)
    kinds = [each["kind"] for each in made]
    own = [each["prompt"] for each in made if each["prompt"].startswith("What is the ")]
    assert 3 <= len(own) == len(set(own)) <= 6
    assert set(kinds) & set(KINDS)
    assert all(text.startswith("[system]You ") and text.endswith("<|im_end|>[user]") for text in asked)
    assert len(set(asked)) == 15


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("How do I plant a tree in my garden?", None),
        ("Why?", "length"),
        ("<|im_start|>user How do I plant a tree?", "markup"),
        ("Tell me a joke, a joke, a joke, a joke, a joke, a joke, please.", "repetition"),
        ("Wie pflanze ich im Garten einen Baum?", "language"),
        ("Как посадить дерево в саду?", "language"),
    ],
)
def test_faults_of_prompts(text: str, why: str | None) -> None:
    assert prompt_fault(text) == why
    if why == "language":
        assert prompt_fault(text, "any") is None


def test_mixtures_are_made_of_passages_and_are_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Title\n\n" + "This is a sentence of eight words, here. " * 10 + "\n\n| table |\n")
    (tmp_path / "a.js").write_text("function f() {\n  let alpha = 1;\n  return alpha;\n}\n\nx();\n")
    own_prose, own_code = read_passages([tmp_path])
    assert [len(passage.text.split()) for passage in own_prose] == [80]
    assert [(passage.language, passage.text[:12]) for passage in own_code] == [("js", "function f()")]
    made = from_templates(own_prose, own_code, tuple(KINDS), 70, 3)
    assert made[:20] == from_templates(own_prose, own_code, tuple(KINDS), 20, 3)
    assert {each.category for each in made} == set(KINDS)
    assert len({each.messages[0]["content"] for each in made}) > 40
    assert not any("{text}" in each.messages[0]["content"] or "{code}" in each.messages[0]["content"] for each in made)
    assert {each.category for each in from_templates(own_prose, [], tuple(KINDS), 20, 3)} == set(KINDS) - {"code"}


def test_what_is_made_can_be_packed(tmp_path: Path, prompts: Path) -> None:
    made = make(tmp_path / "out.jsonl.gz", [prompts], template=True)
    tokenizer = opened(template=True)().tokenizer
    rows = pack_answers(
        tmp_path / "out.jsonl.gz", tokenizer, tmp_path / "rows", name="it", vocab_size=len(tokenizer), window=255
    )
    assert rows.num_documents + rows.held_out().num_documents == len(made)
