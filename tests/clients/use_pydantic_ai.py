"""pydantic-ai: agents with texts, tools and structured outputs, by chats, Responses and messages."""

import asyncio
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from steps import CHAT_V1, QUESTION, TOOLS, TOOLS_V1, package, step

package("pydantic-ai-slim")

chat_model = OpenAIChatModel("smollm2", provider=OpenAIProvider(base_url=CHAT_V1, api_key="none"))
tools_model = OpenAIChatModel("tools", provider=OpenAIProvider(base_url=TOOLS_V1, api_key="none"))
SHORT = {"temperature": 0.0, "max_tokens": 24}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]


def turn(model: Model) -> None:
    """Have a tool called, its result sent back, and an output of a type returned by a second call."""
    called = []
    agent = Agent(model, output_type=Weather, retries=8)

    @agent.tool_plain
    def forecast(city: Literal["Oslo", "Lima"]) -> str:
        """Tell the weather of a city."""
        called.append(city)
        return "sunny"

    for seed in range(8):  # a random model chooses between the tool and the output
        settings = {"max_tokens": 200, "extra_body": {"seed": seed}}
        assert isinstance(agent.run_sync("How is the weather?", model_settings=settings).output, Weather)
        if called:
            return
    raise AssertionError("the tool was never called")


@step
def chat() -> None:
    agent = Agent(chat_model, instructions="You answer in a sentence.", model_settings=SHORT)
    assert "Paris" in agent.run_sync(QUESTION).output


@step
def stream() -> None:
    async def streamed() -> str:
        async with Agent(chat_model, model_settings=SHORT).run_stream(QUESTION) as result:
            return "".join([part async for part in result.stream_text(delta=True)])

    assert "Paris" in asyncio.run(streamed())


@step
def native_output() -> None:
    assert isinstance(Agent(tools_model, output_type=NativeOutput(Weather)).run_sync("Where?").output, Weather)


@step
def tools_and_output_by_chats() -> None:
    turn(tools_model)


@step
def tools_and_output_by_responses() -> None:
    turn(OpenAIResponsesModel("tools", provider=OpenAIProvider(base_url=TOOLS_V1, api_key="none")))


@step
def tools_and_output_by_messages() -> None:
    turn(AnthropicModel("tools", provider=AnthropicProvider(base_url=TOOLS, api_key="none")))
