"""Turns of an agent by the openai package: a tool is called, its result sent back, the answer streamed.

Each turn computes no more than what is new: the tokens that the last turn neither read nor wrote, and those of a page
of the cache that it did not fill.
"""

import openai
from steps import CITIES, PAGE, TOOLS_V1, package, step

package("openai")

client = openai.OpenAI(base_url=TOOLS_V1, api_key="none")
properties = {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "enum": [1, 2, 3]}}
parameters = {"type": "object", "properties": properties, "required": ["city", "days"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": parameters, "description": "The weather."}}
ASKED = {"model": "tools", "tools": [TOOL], "seed": 3, "max_tokens": 300}
messages = [
    {"role": "system", "content": "You tell people of the weather. " * 8},
    {"role": "user", "content": "How is the weather in Lima?"},
]
seen = 0


def count(usage: openai.types.CompletionUsage) -> None:
    """Check that a turn computed what is new only."""
    global seen
    computed = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    new = usage.prompt_tokens - seen
    assert computed < new + PAGE, f"of {usage.prompt_tokens} tokens {new} are new, but {computed} were computed"
    seen = usage.total_tokens


@step
def a_tool_is_called() -> None:
    answer = client.chat.completions.create(messages=messages, tool_choice="required", **ASKED)
    assert answer.choices[0].finish_reason == "tool_calls", answer
    messages.append(answer.choices[0].message)
    count(answer.usage)


@step
def its_result_is_answered_in_a_stream() -> None:
    messages.append({"role": "tool", "content": "sunny", "tool_call_id": messages[-1].tool_calls[0].id})
    more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    *chunks, last = client.chat.completions.create(messages=messages, **more, **ASKED)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text
    messages.append({"role": "assistant", "content": text})
    count(last.usage)


@step
def a_second_call_streamed() -> None:
    messages.append({"role": "user", "content": "And in Oslo?"})
    options = {"include_usage": True}
    with client.chat.completions.stream(
        messages=messages, tool_choice="required", stream_options=options, **ASKED
    ) as events:
        answer = events.get_final_completion()
    assert answer.choices[0].message.tool_calls
    count(answer.usage)
