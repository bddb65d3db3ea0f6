"""Messages of chats: each is in the prompt, in a form that its template reads, or is refused; a last one goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from forerun.engine.chat_template import encode
from forerun.errors import PromptError
from small_tokenizers import byte_level

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}
DEVELOPER = {"role": "developer", "content": "No lies."}
ARGUMENTS = {"city": "Köln"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "dry"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ANY = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
KNOWN = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or m.role == 'ipython' or loop.first %}"
    "[{{ m.role }}]{{ m.content | trim }}{% endif %}{% endfor %}"
)
FIRST_ALONE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('one system message') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content.split('</think>')[-1] | trim }}[end]{% endfor %}"
)


def calls(content: str, arguments: str = "''") -> str:
    called = "<tool_call>{{ c.function.name + " + arguments + " }}</tool_call>"
    called = "{% for c in m.tool_calls or [] %}" + called + "{% endfor %}"
    return "{{ tools }}{% for m in messages %}[{{ m.role }}]" + content + called + "{% endfor %}"


def prompt(template: str, messages: list[Any], **given: Any) -> str:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    text: str = tokenizer.decode(encode(messages, tokenizer, "it", given))
    return text


def test_a_developer_is_the_system_unless_the_template_names_it() -> None:
    assert prompt(ANY, [DEVELOPER, USER]) == "[system]No lies.[user]Hi?[assistant]"
    assert prompt(KNOWN, [DEVELOPER, USER]) == "[system]No lies.[user]Hi?"
    assert prompt(ANY + "{# developer #}", [DEVELOPER, USER]) == "[developer]No lies.[user]Hi?[assistant]"
    unread = "{% for m in messages if m.role != 'developer' %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert prompt(unread, [DEVELOPER, USER]) == "[system]No lies.[user]Hi?"


def test_system_messages_at_the_beginning_are_one_where_one_alone_is_read() -> None:
    assert prompt(ANY, [SYSTEM, DEVELOPER, USER]) == "[system]Be brief.[system]No lies.[user]Hi?[assistant]"
    for template in (FIRST_ALONE, KNOWN):
        assert prompt(template, [SYSTEM, DEVELOPER, USER]) == "[system]Be brief.\n\nNo lies.[user]Hi?"


def test_text_that_looks_like_a_printed_part_is_text() -> None:
    printed = {"role": "user", "content": "{'type': 'text', 'text': 'a'}"}
    parts = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert prompt(parts, [printed]) == f"[user]{printed['content']}"
    text = prompt(calls("{{ m.content }}"), [printed, {"role": "assistant", "tool_calls": [CALL]}])
    assert text.endswith("<tool_call>weather</tool_call>")


def test_no_calls_are_none() -> None:
    strict = "{% for m in messages %}{{ raise_exception('calls') if 'tool_calls' in m }}{{ m.content }}{% endfor %}"
    assert prompt(strict, [USER, {"role": "assistant", "content": "Yes.", "tool_calls": []}, USER]) == "Hi?Yes.Hi?"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (KNOWN, [USER, SYSTEM], "Message 1 of the chat, of the role 'system', leaves no trace"),
        (KNOWN, [USER, {**SYSTEM, "content": "i"}], "Message 1 of the chat, of the role 'system', leaves no trace"),
        (KNOWN, [USER, RESULT], "Message 1 of the chat, of the role 'tool', leaves no trace"),
        ("{{ messages[-1].content }}", [USER, USER], "Message 0 of the chat, of the role 'user', leaves no trace"),
        (ANY, [USER, CALLED, RESULT], "Message 1 of the chat, of the role 'assistant', leaves no trace"),
        (ANY, [USER, {"role": "function", "name": "f", "content": "x"}], "role 'function'.* The result of a call has"),
        (KNOWN + "{{ 'function' == 'function' }}", [{**USER, "role": "function"}], "role 'function', which is not kno"),
        (ANY, [USER, {"role": "critic", "content": "x"}], "Message 1 of the chat has the role 'critic', which is not"),
        (ANY, [{"role": 5, "content": "x"}], "role 5, which is not known"),
        (ANY, [USER, {"role": "assistant", "content": None}], "content of message 1 of the chat is null"),
        (ANY, [{"role": "user", "content": None, "tool_calls": [CALL]}], "content of message 0 of the chat is null"),
        (
            ANY,
            [{"role": "assistant", "content": "", "function_call": {"name": "f"}}],
            "function_call, .* Give tool_calls",
        ),
        (ANY, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "are not JSON"),
    ],
    ids=range(13),
)
def test_what_is_refused_by_name(template: str, messages: list[Any], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        prompt(template, messages)


@pytest.mark.parametrize(
    ("template", "given", "said"),
    [
        (ANY, {"tools": TOOLS}, "does not read tools"),
        (ANY, {"documents": [{"text": "x"}]}, "does not read documents"),
        (KNOWN, {"add_generation_prompt": False}, "does not read add_generation_prompt"),
        (ANY, {"continue_final_message": True, "add_generation_prompt": True}, "both true"),
        ("{% if %}", {}, "no Jinja template, by its line 1"),
    ],
)
def test_options_that_would_be_ignored(template: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        prompt(template, [USER], **given)
    assert prompt(ANY, [USER], add_generation_prompt=False, tools=None, documents=[]) == "[user]Hi?"


def test_roles_that_the_template_names_are_its_own() -> None:
    assert prompt(KNOWN, [USER, {"role": "ipython", "content": "3"}]) == "[user]Hi?[ipython]3"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (calls("{{ 'x' + m.content if m.content is defined }}"), "weather"),
        (calls("{{ 'x' + m.content }}"), "weather"),
        (calls("{{ 'x' + m.content if m.content is not none }}"), "weather"),
        (calls("{{ m.content }}", "c.function.arguments"), f"weather{json.dumps(ARGUMENTS, ensure_ascii=False)}"),
        (
            calls("{{ m.content }}", "(c.function.arguments | tojson)"),
            f"weather{json.dumps(ARGUMENTS, ensure_ascii=False)}",
        ),
    ],
    ids=["content left out", "content empty", "content null", "arguments as text", "arguments as an object"],
)
def test_calls_without_content(template: str, text: str) -> None:
    for called in (CALLED, {"role": "assistant", "tool_calls": [CALL]}, {**CALLED, "refusal": None, "name": None}):
        assert f"<tool_call>{text}</tool_call>" in prompt(template, [USER, called, RESULT], tools=TOOLS)


def test_a_template_that_leaves_out_calls_is_given_them_as_the_model_writes_them() -> None:
    written = prompt(ANY + "{# <tool_call></tool_call> #}", [USER, {**CALLED, "content": "See:"}, RESULT])
    called = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert written == f"[user]Hi?[assistant]See:\n{called}[tool]dry[assistant]"


def test_a_last_message_goes_on() -> None:
    said = {"role": "assistant", "content": "one, two, "}
    continues = {"continue_final_message": True}
    assert prompt(ANY, [USER, said], **continues) == "[user]Hi?[assistant]one, two, "
    assert prompt(THINKS, [USER, said], **continues) == "[user]Hi?[end][assistant]one, two, "
    assert prompt(ANY, [USER, said], **continues, add_generation_prompt=False) == "[user]Hi?[assistant]one, two, "
    assert prompt(THINKS, [USER, {**said, "content": ""}], **continues) == "[user]Hi?[end][assistant]"


def test_thinking_goes_on_or_is_there_before_what_goes_on() -> None:
    thought = {"role": "assistant", "reasoning_content": "Hm, "}
    continues = {"continue_final_message": True}
    for content in ({}, {"content": None}, {"content": ""}):
        assert prompt(THINKS, [USER, {**thought, **content}], **continues) == "[user]Hi?[end][assistant]<think>Hm, "
    said = [USER, {**thought, "content": "one,"}]
    assert prompt(THINKS, said, **continues) == "[user]Hi?[end][assistant]<think>Hm, </think>one,"
    assert prompt(THINKS, [*said, USER]) == "[user]Hi?[end][assistant]one,[end][user]Hi?[end]"  # its own decision
    with pytest.raises(PromptError, match="Message 1 of the chat, of the role 'assistant', leaves no trace"):
        prompt(ANY, said, **continues)
    with pytest.raises(PromptError, match="it does not write the reasoning_content of the last message"):
        prompt(ANY, [USER, thought], **continues)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (USER, "Only a last message of the role 'assistant' can be continued, and this chat's has 'user'"),
        ({**CALLED, "content": "See:"}, "has calls, so it is not continued"),
    ],
)
def test_what_is_not_continued(last: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptError, match=said):
        prompt(calls("{{ m.content }}"), [USER, last], continue_final_message=True)
