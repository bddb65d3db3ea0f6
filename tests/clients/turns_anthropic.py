"""Turns of an agent by the anthropic package: a tool is called, its result sent back, the answer streamed.

Each turn computes no more than what is new, as in turns_openai.py.
"""

import anthropic
from steps import CITIES, PAGE, TOOLS, package, step

package("anthropic")

client = anthropic.Anthropic(base_url=TOOLS, api_key="none")
properties = {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "enum": [1, 2, 3]}}
schema = {"type": "object", "properties": properties, "required": ["city", "days"], "additionalProperties": False}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": schema}
ASKED = {"model": "tools", "system": "You tell people of the weather. " * 8, "tools": [TOOL], "max_tokens": 300}
messages = [{"role": "user", "content": "How is the weather in Lima?"}]
seen = 0


def count(usage: anthropic.types.Usage) -> None:
    """Check that a turn computed what is new only."""
    global seen
    total = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + usage.cache_read_input_tokens
    computed, new = total - usage.cache_read_input_tokens, total - seen
    assert computed < new + PAGE, f"of {total} tokens {new} are new, but {computed} were computed"
    seen = total + usage.output_tokens


@step
def a_tool_is_called() -> None:
    answer = client.messages.create(messages=messages, tool_choice={"type": "any"}, **ASKED)
    assert answer.stop_reason == "tool_use", answer
    messages.append({"role": "assistant", "content": answer.content})
    count(answer.usage)


@step
def its_result_is_answered_in_a_stream() -> None:
    called = messages[-1]["content"][-1]
    messages.append(
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": called.id, "content": "sunny"}]}
    )
    with client.messages.stream(messages=messages, extra_body={"temperature": 0}, **ASKED) as events:
        text = "".join(events.text_stream)
    answer = events.get_final_message()
    assert text and text == answer.content[0].text
    messages.append({"role": "assistant", "content": answer.content})
    count(answer.usage)


@step
def a_second_call_streamed() -> None:
    messages.append({"role": "user", "content": "And in Oslo?"})
    with client.messages.stream(messages=messages, tool_choice={"type": "any"}, **ASKED) as events:
        answer = events.get_final_message()
    assert answer.stop_reason == "tool_use"
    count(answer.usage)
