"""The OpenAI Agents SDK: agents with texts, tools and structured outputs, by chats and Responses."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from steps import CHAT_V1, QUESTION, TOOLS_V1, package, step

package("openai-agents")


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]


@function_tool
def forecast(city: Literal["Oslo", "Lima"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def chat_model() -> Model:
    return OpenAIChatCompletionsModel("smollm2", AsyncOpenAI(base_url=CHAT_V1, api_key="none"))


def turn(kind: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]) -> None:
    """Have a tool called, its result sent back, and the answer streamed."""
    model = kind("tools", AsyncOpenAI(base_url=TOOLS_V1, api_key="none"))
    settings = ModelSettings(tool_choice="required", max_tokens=200)
    agent = Agent("agent", instructions="Tell.", model=model, tools=[forecast], model_settings=settings)

    async def streamed() -> tuple[list[str], object]:
        run = Runner.run_streamed(agent, "How is the weather?")
        kinds = [event.item.type async for event in run.stream_events() if event.type == "run_item_stream_event"]
        return kinds, run.final_output

    kinds, output = asyncio.run(streamed())
    assert "tool_call_output_item" in kinds and kinds[-1] == "message_output_item" and output, kinds


@step
def chat() -> None:
    agent = Agent("agent", model=chat_model(), model_settings=ModelSettings(temperature=0, max_tokens=24))
    assert "Paris" in Runner.run_sync(agent, QUESTION).final_output


@step
def output_type_by_chats() -> None:
    model = OpenAIChatCompletionsModel("tools", AsyncOpenAI(base_url=TOOLS_V1, api_key="none"))
    assert isinstance(Runner.run_sync(Agent("agent", model=model, output_type=Weather), "Where?").final_output, Weather)


@step
def output_type_by_responses() -> None:
    model = OpenAIResponsesModel("tools", AsyncOpenAI(base_url=TOOLS_V1, api_key="none"))
    assert isinstance(Runner.run_sync(Agent("agent", model=model, output_type=Weather), "Where?").final_output, Weather)


def output_and_tools(kind: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]) -> None:
    """Get an output of a type from an agent that may call a tool before."""
    model = kind("tools", AsyncOpenAI(base_url=TOOLS_V1, api_key="none"))
    # a random model calls tools again and again, the less at a high temperature
    settings = ModelSettings(temperature=2, max_tokens=200, extra_body={"seed": 1})
    agent = Agent("agent", model=model, tools=[forecast], output_type=Weather, model_settings=settings)
    result = Runner.run_sync(agent, "How is the weather?")
    assert isinstance(result.final_output, Weather)
    assert "tool_call_output_item" in [item.type for item in result.new_items]


@step
def output_type_and_tools_by_chats() -> None:
    output_and_tools(OpenAIChatCompletionsModel)


@step
def output_type_and_tools_by_responses() -> None:
    output_and_tools(OpenAIResponsesModel)


@step
def tools_by_chats() -> None:
    turn(OpenAIChatCompletionsModel)


@step
def tools_by_responses() -> None:
    turn(OpenAIResponsesModel)
