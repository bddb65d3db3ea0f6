"""The anthropic package: messages, streams, tools, structured outputs, thinking, counts of tokens."""

from typing import Literal

import anthropic
from pydantic import BaseModel
from steps import CHAT, QUESTION, TOOLS, package, step

package("anthropic")

chat, tools = (anthropic.Anthropic(base_url=url, api_key="none") for url in (CHAT, TOOLS))
ASKED = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}]}
ANSWERED = {**ASKED, "max_tokens": 24, "extra_body": {"temperature": 0}}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]
    days: Literal[1, 2, 3]


TOOL = {"name": "weather", "description": Weather.__doc__, "input_schema": Weather.model_json_schema()}
EFFORT = {"output_config": {"effort": "low"}}
CALL = {"model": "tools", "messages": [{"role": "user", "content": "How is the weather?"}], "max_tokens": 200}


@step
def message() -> None:
    answer = chat.messages.create(**ANSWERED, system="You answer in a sentence.", metadata={"user_id": "u"})
    assert "Paris" in answer.content[0].text and answer.stop_reason in ("end_turn", "max_tokens")
    assert answer.usage.input_tokens and answer.usage.output_tokens > 1


@step
def stream() -> None:
    with chat.messages.stream(**ANSWERED, system=[{"type": "text", "text": "You answer in a sentence."}]) as events:
        text = "".join(events.text_stream)
    final = events.get_final_message()
    assert "Paris" in text and final.content[0].text == text and final.usage.output_tokens > 1


@step
def stop_sequences() -> None:
    answer = chat.messages.create(**ANSWERED, stop_sequences=["Paris"])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == "Paris"


@step
def count_tokens() -> None:
    counted = chat.messages.count_tokens(**ASKED).input_tokens
    usage = chat.messages.create(**ANSWERED).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert tools.messages.count_tokens(model="tools", messages=CALL["messages"], tools=[TOOL]).input_tokens > 100


@step
def tools_any() -> None:
    answer = tools.messages.create(**CALL, tools=[TOOL], tool_choice={"type": "any"})
    assert answer.stop_reason == "tool_use" and Weather(**answer.content[-1].input)


@step
def tools_by_name_streamed() -> None:
    with tools.messages.stream(**CALL, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}) as events:
        parts = "".join(event.partial_json for event in events if event.type == "input_json")
    answer = events.get_final_message()
    assert Weather.model_validate_json(parts) == Weather(**answer.content[-1].input)


@step
def tool_runner() -> None:
    @anthropic.beta_tool
    def weather(city: Literal["Oslo", "Lima"]) -> str:
        """Tell the weather of a city."""
        return f"sunny in {city}"

    runner = tools.beta.messages.tool_runner(**CALL, tools=[weather], thread=False)
    assert runner.until_done().content


@step
def structured_output() -> None:
    answer = tools.messages.parse(**CALL, output_format=Weather)
    assert isinstance(answer.parsed_output, Weather)
    with tools.messages.stream(**CALL, output_format=Weather) as events:
        assert isinstance(events.get_final_message().parsed_output, Weather)


@step
def effort() -> None:
    plain, low = (tools.messages.count_tokens(**ASKED | {"model": "tools"}, **more) for more in ({}, EFFORT))
    assert low.input_tokens > plain.input_tokens


@step
def thinking() -> None:
    thinks = {"type": "enabled", "budget_tokens": 1024}
    with tools.messages.stream(**CALL | {"max_tokens": 1100}, thinking=thinks) as events:
        text = "".join(event.thinking for event in events if event.type == "thinking")
    (block,) = events.get_final_message().content
    assert text and block.type == "thinking" and block.thinking == text


@step
def models() -> None:
    assert [each.id for each in chat.models.list()] == ["smollm2"]
