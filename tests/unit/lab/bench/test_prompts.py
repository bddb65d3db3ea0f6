"""From cases to prompts in token ids."""

from __future__ import annotations

from typing import Any

import pytest

from doubles import FakeModel
from forerun import LLM
from forerun.errors import ConfigError
from forerun.lab.bench.prompts import check_lengths, plain_answer, requests
from forerun.utils.workloads import Case, categories_in_turn
from small_tokenizers import byte_level, decoded

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}!{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = byte_level()
    made.chat_template = TEMPLATE
    return made


def never(token_ids: list[int]) -> str:
    raise AssertionError


def test_texts_and_chats(tokenizer: Any) -> None:
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "hello"})
    text, talk = requests([Case("t", "hello", "world"), Case("c", messages=chat, category="x")], tokenizer, "m", never)
    assert (text.name, text.category, decoded(tokenizer, text.token_ids), text.reference) == ("t", "", "hello", "world")
    assert (talk.category, decoded(tokenizer, talk.token_ids)) == ("x", "system: s!user: hello!a")


def test_each_turn_is_a_prompt_with_the_same_history_for_all(tokenizer: Any) -> None:
    asked = []

    def answer(token_ids: list[int]) -> str:
        asked.append(decoded(tokenizer, token_ids))
        return f"answer {len(asked)}"

    made = requests([Case("q", turns=("one", "two", "three"), category="x")], tokenizer, "m", answer)
    assert [each.name for each in made] == ["q, turn 1", "q, turn 2", "q, turn 3"]
    assert asked == [decoded(tokenizer, each.token_ids) for each in made[:2]]
    assert decoded(tokenizer, made[2].token_ids) == (
        "user: one!assistant: answer 1!user: two!assistant: answer 2!user: three!a"
    )


@pytest.mark.parametrize("case", [Case("q7", turns=("a",)), Case("q7", messages=({"role": "user", "content": "a"},))])
def test_a_chat_needs_a_template(case: Case) -> None:
    for tokenizer in (byte_level(), None):
        with pytest.raises(ConfigError, match="q7 is a chat, but m has no chat template"):
            requests([case], tokenizer, "m", never)


def test_without_a_tokenizer_a_prompt_holds_token_ids() -> None:
    assert requests([Case("a", "5 3 8")], None, "m", never)[0].token_ids == [5, 3, 8]
    with pytest.raises(ConfigError, match="m cannot be given the prompt a: it has no tokenizer"):
        requests([Case("a", "secret")], None, "m", never)


def test_the_answer_ends_with_the_text() -> None:
    tokenizer = byte_level()
    model: Any = FakeModel(vocab_size=200)
    said = model.greedy([3, 4], 20)
    ending: Any = FakeModel(vocab_size=200, eos_token_ids=said[5:6])
    assert said[5] not in said[:5]
    assert plain_answer(LLM(ending, None, tokenizer=tokenizer), 20)([3, 4]) == decoded(tokenizer, said[:5])


def test_a_conversation_that_outgrows_the_context_names_the_turn(tokenizer: Any) -> None:
    model: Any = FakeModel(vocab_size=300, context_length=5)
    answer = plain_answer(LLM(model, None, tokenizer=tokenizer), 28)
    with pytest.raises(ConfigError, match="q cannot go on after turn 1"):
        requests([Case("q", turns=("a", "b"))], tokenizer, "m", answer)


def test_prompts_are_checked_against_the_context(tokenizer: Any) -> None:
    made = requests([Case("long", "hello" * 10)], tokenizer, "m", never)
    check_lengths(made, 6, len(made[0].token_ids) + 6, "m")
    with pytest.raises(ConfigError, match=f"long has {len(made[0].token_ids)} tokens"):
        check_lengths(made, 6, len(made[0].token_ids) + 5, "m")


def test_categories_come_in_turn() -> None:
    cases = [Case(name, "p", category=name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "c2")]
    assert [case.name for case in categories_in_turn(cases)] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    same = [Case(name, "p") for name in "xyz"]
    assert categories_in_turn(same) == same
