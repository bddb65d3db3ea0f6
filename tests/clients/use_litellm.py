"""LiteLLM: chats, streams, structured outputs, tools, and the same server as one of Responses and of messages."""

import json
from typing import Literal

import litellm
from pydantic import BaseModel
from steps import CHAT_V1, QUESTION, TOOLS, TOOLS_V1, package, step

package("litellm")

CHAT = {"model": "openai/smollm2", "api_base": CHAT_V1, "api_key": "none", "temperature": 0, "max_tokens": 24}
TOOL_MODEL = {"model": "openai/tools", "api_base": TOOLS_V1, "api_key": "none"}
ASKED = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Oslo", "Lima"]


function = {"name": "weather", "description": Weather.__doc__, "parameters": Weather.model_json_schema()}
CALL = {"messages": [{"role": "user", "content": "How is it?"}], "tools": [{"type": "function", "function": function}]}


@step
def chat() -> None:
    assert "Paris" in litellm.completion(messages=ASKED, **CHAT).choices[0].message.content


@step
def stream() -> None:
    chunks = list(litellm.completion(messages=ASKED, stream=True, stream_options={"include_usage": True}, **CHAT))
    whole = litellm.stream_chunk_builder(chunks, messages=ASKED)
    assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens > 1


@step
def structured_output() -> None:
    answer = litellm.completion(messages=ASKED, response_format=Weather, **TOOL_MODEL)
    assert Weather.model_validate_json(answer.choices[0].message.content)


@step
def tools_and_their_results() -> None:
    message = litellm.completion(**CALL, **TOOL_MODEL, tool_choice="required").choices[0].message
    called = message.tool_calls[0]
    assert Weather(**json.loads(called.function.arguments))
    turns = [*CALL["messages"], message, {"role": "tool", "content": "sunny", "tool_call_id": called.id}]
    chunks = litellm.completion(**CALL | {"messages": turns}, **TOOL_MODEL, stream=True, max_tokens=64, temperature=0)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@step
def responses() -> None:
    answer = litellm.responses(input="Why?", max_output_tokens=16, **TOOL_MODEL)
    assert answer.output[0].content[0].text


@step
def anthropic_messages() -> None:
    model = {"model": "anthropic/tools", "api_base": TOOLS, "api_key": "none"}
    answer = litellm.completion(**CALL, **model, tool_choice="required", max_tokens=200)
    assert Weather(**json.loads(answer.choices[0].message.tool_calls[0].function.arguments))
