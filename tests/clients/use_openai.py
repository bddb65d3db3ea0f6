"""The openai package: chats, streams, structured outputs, tools, completions."""

from typing import Literal

import openai
from pydantic import BaseModel
from steps import CHAT_V1, QUESTION, TOOLS_V1, package, step

package("openai")

chat, tools = (openai.OpenAI(base_url=url, api_key="none") for url in (CHAT_V1, TOOLS_V1))
ASKED = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Oslo", "Lima"]
    days: Literal[1, 2, 3]


CALL = {
    "model": "tools",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [openai.pydantic_function_tool(Weather)],
}


@step
def chat_() -> None:
    answer = chat.chat.completions.create(**ASKED, max_completion_tokens=24)
    assert "Paris" in answer.choices[0].message.content and answer.usage.completion_tokens > 1


@step
def stream() -> None:
    with chat.chat.completions.stream(**ASKED, stream_options={"include_usage": True}, max_tokens=24) as events:
        text = "".join(event.delta for event in events if event.type == "content.delta")
    final = events.get_final_completion()
    assert "Paris" in text and final.choices[0].message.content == text and final.usage.completion_tokens > 1


@step
def fields_without_effect() -> None:
    more = {"store": True, "service_tier": "auto", "metadata": {"a": "b"}, "user": "u", "parallel_tool_calls": True}
    more |= {"safety_identifier": "s", "prompt_cache_key": "k", "verbosity": "low", "reasoning_effort": "low"}
    more["extra_body"] = {"skip_special_tokens": True, "top_k": -1}
    chat.chat.completions.create(**ASKED, **more, max_completion_tokens=4)


@step
def reasoning_effort() -> None:
    asked = {"model": "tools", "messages": CALL["messages"], "max_tokens": 4}
    plain, low = (tools.chat.completions.create(**asked, **more) for more in ({}, {"reasoning_effort": "low"}))
    assert low.usage.prompt_tokens > plain.usage.prompt_tokens


@step
def thinking() -> None:
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = tools.chat.completions.create(model="tools", messages=CALL["messages"], max_tokens=64, extra_body=more)
    assert answer.choices[0].message.reasoning_content and not answer.choices[0].message.content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 1


@step
def parse() -> None:
    answer = tools.chat.completions.parse(model="tools", messages=CALL["messages"], response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


@step
def stream_parse() -> None:
    with tools.chat.completions.stream(model="tools", messages=CALL["messages"], response_format=Weather) as events:
        assert isinstance(events.get_final_completion().choices[0].message.parsed, Weather)


@step
def tools_auto() -> None:
    answer = tools.chat.completions.create(**CALL, max_tokens=32, seed=1)
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls


@step
def tools_required() -> None:
    answer = tools.chat.completions.parse(**CALL, tool_choice="required")
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    assert answer.choices[0].finish_reason == "tool_calls"


@step
def tools_by_name_streamed() -> None:
    named = {"type": "function", "function": {"name": "Weather"}}
    with tools.chat.completions.stream(**CALL, tool_choice=named) as events:
        calls = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert len(calls) == 1 and isinstance(calls[0].parsed_arguments, Weather)


@step
def completions() -> None:
    answer = chat.completions.create(model="smollm2", prompt="1, 2, 3,", max_tokens=8, temperature=0, logprobs=1)
    assert "4" in answer.choices[0].text and answer.choices[0].logprobs.token_logprobs


@step
def models() -> None:
    assert [each.id for each in chat.models.list()] == ["smollm2"] and chat.models.retrieve("smollm2")
