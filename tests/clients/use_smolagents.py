"""smolagents: the model alone, and agents that call tools."""

from typing import Literal

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole
from steps import CHAT_V1, QUESTION, TOOLS_V1, package, step

package("smolagents")

chat_model = OpenAIModel("smollm2", api_base=CHAT_V1, api_key="none", temperature=0, max_tokens=24)
tools_model = OpenAIModel("tools", api_base=TOOLS_V1, api_key="none", max_tokens=400)
ASKED = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]
called = []


@tool
def weather(city: Literal["Oslo", "Lima"]) -> str:
    """Tell the weather of a city.

    Args:
        city: Its name.
    """
    called.append(city)
    return "sunny"


def turn(**options: object) -> None:
    """Run an agent until the random model has chosen the tool, and has given a final answer."""
    called.clear()
    for _ in range(8):
        agent = ToolCallingAgent(
            tools=[weather], model=tools_model, max_steps=8, verbosity_level=LogLevel.OFF, **options
        )
        assert agent.run("How is the weather?") is not None
        if called:
            return
    raise AssertionError("the tool was never called")


@step
def chat() -> None:
    assert "Paris" in chat_model.generate(ASKED).content


@step
def stream() -> None:
    assert "Paris" in "".join(delta.content or "" for delta in chat_model.generate_stream(ASKED))


@step
def tool_calling_agent() -> None:
    turn()


@step
def tool_calling_agent_streamed() -> None:
    turn(stream_outputs=True)
