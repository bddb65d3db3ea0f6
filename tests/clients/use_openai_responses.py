"""Responses by the openai package: texts, streams, structured outputs, tools, turns that the server keeps."""

import json
from typing import Literal

import openai
from pydantic import BaseModel
from steps import CHAT_V1, PAGE, QUESTION, TOOLS_V1, package, step

package("openai")

chat, tools = (openai.OpenAI(base_url=url, api_key="none") for url in (CHAT_V1, TOOLS_V1))
ASKED = {"model": "smollm2", "input": QUESTION, "temperature": 0, "max_output_tokens": 24}


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Oslo", "Lima"]
    days: Literal[1, 2, 3]


CALL = {"model": "tools", "input": "How is the weather?", "tools": [openai.pydantic_function_tool(Weather)["function"]]}
CALL["tools"][0]["type"] = "function"


@step
def responses() -> None:
    answer = chat.responses.create(**ASKED, instructions="You answer in a sentence.")
    assert "Paris" in answer.output_text and answer.usage.output_tokens > 1


@step
def responses_streamed() -> None:
    with chat.responses.stream(**ASKED) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert "Paris" in text and events.get_final_response().output_text == text


@step
def responses_parsed() -> None:
    answer = tools.responses.parse(model="tools", input="Which?", text_format=Weather)
    assert isinstance(answer.output_parsed, Weather)


@step
def previous_response_id() -> None:
    first = chat.responses.create(**ASKED, store=True)
    more = chat.responses.create(**ASKED | {"input": "And of Italy?"}, previous_response_id=first.id)
    assert "Rome" in more.output_text and more.usage.input_tokens > first.usage.input_tokens
    assert chat.responses.retrieve(first.id).output_text == first.output_text
    (_, _, last) = chat.responses.input_items.list(more.id, order="asc")
    assert last.content[0].text == "And of Italy?"
    chat.responses.delete(first.id)


@step
def reasoning() -> None:
    asked = {"model": "tools", "input": "Why?", "max_output_tokens": 4}
    plain, low = (tools.responses.create(**asked, **more) for more in ({}, {"reasoning": {"effort": "low"}}))
    assert low.usage.input_tokens > plain.usage.input_tokens


@step
def responses_with_tools() -> None:
    first = tools.responses.create(**CALL, tool_choice="required")
    calls = [item for item in first.output if item.type == "function_call"]
    assert Weather(**json.loads(calls[0].arguments))
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "sunny"}
    turn = [{"role": "user", "content": CALL["input"]}, *first.output, result]
    assert tools.responses.create(**CALL | {"input": turn}, max_output_tokens=64, temperature=0).output_text


@step
def tools_by_previous_response_id() -> None:
    first = tools.responses.create(**CALL, tool_choice="required")
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "sunny"} for call in calls]
    more = {"previous_response_id": first.id, "max_output_tokens": 64, "temperature": 0}
    answer = tools.responses.create(**CALL | {"input": results}, **more)
    new = answer.usage.input_tokens - first.usage.total_tokens
    computed = answer.usage.input_tokens - answer.usage.input_tokens_details.cached_tokens
    assert answer.output_text and new > 0 and computed < new + PAGE, f"{new} tokens are new, {computed} were computed"


@step
def responses_with_tools_streamed() -> None:
    with tools.responses.stream(**CALL, tool_choice={"type": "function", "name": "Weather"}) as events:
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(done) == 1 and Weather(**json.loads(done[0].arguments))
