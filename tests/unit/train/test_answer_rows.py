"""Answers become rows of exactly the tokens that the target read and gave, and what is left out is said."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from forerun.errors import ConfigError
from forerun.train.data import answer_rows
from forerun.train.data.answer_file import ChatText, read_answers
from forerun.train.data.answer_rows import pack_answers
from forerun.train.data.packed import PackedShard
from forerun.utils import workloads
from heads import AdditiveModel
from small_tokenizers import byte_level

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<s>{% for m in messages %}<|h|>{{ m['role'] }}<|/h|>\n\n{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|h|>assistant<|/h|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}"
)


@pytest.fixture
def chatty() -> Any:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    return tokenizer


def pack(source: Path, tokenizer: Any, **options: Any) -> PackedShard:
    given = {"window": 255, "prompt_positions": 0, "held_out": 0.0, "name": "it", "vocab_size": 5_000, **options}
    return pack_answers(source, tokenizer, source.with_name("packed"), **given)


def written(path: Path, *lines: dict[str, object]) -> Path:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def documents(rows: PackedShard, tokenizer: Any) -> set[tuple[str, str]]:
    """(whole text, what is wanted of it) of each document."""
    batch = rows.rows(list(range(len(rows))))
    found = set()
    for tokens, wanted, numbers in zip(batch.tokens, batch.wanted, batch.documents, strict=True):
        for number in range(int(numbers.max()) + 1):
            mine = numbers == number
            found.add((tokenizer.decode(tokens[mine]), tokenizer.decode(tokens[mine & wanted])))
    return found


def test_a_template_is_taken_apart() -> None:
    tokenizer = byte_level()
    for template, bare, opening, closing in (
        (CHATML, "<|im_start|>user\n", "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n"),
        (LLAMA3, "<s><|h|>user<|/h|>\n\n", "<s><|h|>system<|/h|>\n\nS<|eot|><|h|>user<|/h|>\n\n", "<|eot|>"),
        (NO_SYSTEM, None, "<u>", "</u>"),
    ):
        tokenizer.chat_template = template
        chat = ChatText(tokenizer, "it")
        assert (chat.bare_opening, chat.user_opening("S"), chat.closing) == (bare, opening, closing)


def test_of_an_answer_all_is_wanted_and_of_a_prompt_nothing_or_some(tmp_path: Path, chatty: Any) -> None:
    asked = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    source = written(
        tmp_path / "answers.jsonl.gz",
        {"system": True, "prompt": "Why?", "answer": "Because.", "complete": True},
        {"system": False, "prompt": "Why?", "answer": "So", "complete": False},
        {"system": "Be odd.", "prompt": "Why?", "answer": "No.", "complete": True},
        {"messages": [{"role": "user", "content": "Why?"}], "answer": "Well", "complete": False},
        {"text": "def f(", "answer": "x):", "complete": False},
        {"text": "import this"},
    )
    rows = pack(source, chatty)
    assert documents(rows, chatty) == {
        ("<|im_start|>system\nBe kind.<|im_end|>\n" + asked + "Because.<|im_end|>", "Because.<|im_end|>"),
        (asked + "So", "So"),
        ("<|im_start|>system\nBe odd.<|im_end|>\n" + asked + "No.<|im_end|>", "No.<|im_end|>"),
        ("<|im_start|>system\nBe kind.<|im_end|>\n" + asked + "Well", "Well"),
        ("def f(x):", "x):"),
        ("import this", "mport this"),
    }
    some = pack(source, chatty, prompt_positions=3)
    assert some.num_wanted == rows.num_wanted + 4 * 3 + min(3, len(chatty("def f(")["input_ids"]) - 1)


def test_answers_in_a_folder_are_found_beside_text(tmp_path: Path, chatty: Any) -> None:
    folder = tmp_path / "data"
    (folder / "more").mkdir(parents=True)
    lines = [{"prompt": f"{place}?", "answer": f"{place}!", "system": False, "complete": True} for place in range(2)]
    written(folder / "answers.jsonl.gz", lines[0])
    written(folder / "more" / "answers.jsonl", lines[1])
    (folder / "answers.jsonl.gz.json").write_text("{}")
    (folder / "notes.txt").write_text("A text.")
    written(folder / "prompts.jsonl", {"prompt": "Why?"})
    written(folder / "metrics.jsonl", {"loss": 1.0})
    told: list[str] = []
    rows = pack(folder, chatty, report=told.append)
    assert told[0] == "2 lines or texts left out: files without answers"
    assert {wanted for _, wanted in documents(rows, chatty)} == {"0!<|im_end|>", "1!<|im_end|>", " text."}


def test_rows_are_made_anew_only_where_what_they_depend_on_has_changed(tmp_path: Path, chatty: Any) -> None:
    source = written(tmp_path / "answers.jsonl", *({"prompt": f"{i}?", "answer": f"{i}"} for i in range(30)))
    index = tmp_path / "packed" / "packed.json"
    rows = pack(source, chatty)
    before = index.stat().st_ino
    pack(source, chatty)
    assert index.stat().st_ino == before
    halves = pack(source, chatty, held_out=0.5)
    assert index.stat().st_ino != before
    assert 5 < halves.num_documents < 25
    assert halves.num_documents + halves.held_out().num_documents == rows.num_documents == 30
    before = index.stat().st_ino
    chatty.chat_template = LLAMA3
    pack(source, chatty, held_out=0.5)
    assert index.stat().st_ino != before


def test_what_is_measured_on_is_left_out_and_answers_of_another_target_are_told(tmp_path: Path, chatty: Any) -> None:
    question = workloads.load_workload("questions")[0].messages[0]["content"]
    source = written(
        tmp_path / "answers.jsonl",
        {"prompt": "Tell me: " + question.upper(), "answer": "Yes."},
        {"prompt": "Say it.", "answer": question},
        {"prompt": "Say it.", "answer": "It."},
    )
    told: list[str] = []
    (tmp_path / "answers.jsonl.json").write_text(json.dumps({"run": {"target": "5000-8-1--"}}))
    rows = pack(source, chatty, report=told.append, target="4000-8-1--")
    assert rows.num_documents == 1
    assert "another target than it" in told[0] and told[1].startswith("2 lines or texts left out: 13 words in a row")


def test_of_few_documents_one_is_held_out(tmp_path: Path, chatty: Any) -> None:
    lines = [{"prompt": f"Say {number}.", "answer": f"{number}!"} for number in range(3)]
    rows = pack(written(tmp_path / "three.jsonl", *lines), chatty, held_out=1e-9)
    assert (rows.num_documents, rows.held_out().num_documents) == (2, 1)
    assert len(documents(rows, chatty) | documents(rows.held_out(), chatty)) == 3
    again = pack(tmp_path / "three.jsonl", chatty, held_out=1e-9)
    assert again.held_out().num_documents == 1
    for name, few in (("one", lines[:1]), ("same", [lines[0], lines[0]])):
        rows = pack(written(tmp_path / f"{name}.jsonl", *few), chatty, held_out=1e-9)
        assert (rows.num_documents, rows.held_out().num_documents) == (len(few), 0)


def test_training_tells_of_answers_of_another_target(
    tmp_path: Path, chatty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Any = AdditiveModel()
    monkeypatch.setattr(served, "vocab_size", 5_000)
    monkeypatch.setattr(answer_rows, "target_fingerprint", lambda target: "5000-9-1--" if target is served else "")
    source = written(tmp_path / "answers.jsonl", {"prompt": "Say it.", "answer": "It."})
    (tmp_path / "answers.jsonl.json").write_text(json.dumps({"run": {"target": "5000-8-1--"}}))
    console = Console(record=True, width=200)
    answer_rows.read_rows(source, served, chatty, tmp_path / "packed", 255, console)
    said = console.export_text()
    assert f"another target than {served.name} gave these answers" in said
    assert "nothing is held out" in said and "Give two or more" in said
    answer_rows.read_rows(tmp_path / "packed", served, chatty, tmp_path, 255, console)
    assert "nothing is held out" in console.export_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"answers\.jsonl:2: it is not JSON"),
        ('{"prompt": "a"}', r"answers\.jsonl:2: there is no answer"),
        ('{"prompt": "a", "text": "b", "answer": "c"}', r"answers\.jsonl:2: one of prompt, messages, text"),
        ('{"prompt": 3, "answer": "c"}', r"answers\.jsonl:2: prompt"),
        ('{"prompt": "a", "answer": "c", "system": 3}', r"answers\.jsonl:2: system must be"),
        ('{"messages": [{"role": "user"}], "answer": "c"}', r"answers\.jsonl:2: messages\[0\]: content is missing"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message):
        list(read_answers(path))


def test_a_cut_file_and_one_without_text_are_refused(tmp_path: Path, chatty: Any) -> None:
    source = written(tmp_path / "answers.jsonl.gz", *({"text": str(number)} for number in range(1_000)))
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"answers\.jsonl\.gz cannot be read"):
        pack(source, chatty)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="no token to be trained on"):
        pack(tmp_path / "empty.txt", chatty)
    with pytest.raises(ConfigError, match="does not exist"):
        pack(tmp_path / "nothing.jsonl", chatty)
