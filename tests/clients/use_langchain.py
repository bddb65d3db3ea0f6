"""LangChain's ChatOpenAI: chats, streams, structured outputs, tools; by chats and by Responses."""

from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from steps import CHAT, CHAT_V1, QUESTION, TOOLS_V1, documented, package, step

package("langchain-openai")

chat_model = ChatOpenAI(model="smollm2", base_url=CHAT_V1, api_key="none", temperature=0, max_tokens=24)
# seeded, since a random model may write nothing but text up to the limit
TOOLS_MODEL = {"model": "tools", "base_url": TOOLS_V1, "api_key": "none", "max_tokens": 200, "extra_body": {"seed": 3}}
tools_model = ChatOpenAI(**TOOLS_MODEL)


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]


@tool
def weather(city: Literal["Oslo", "Lima"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def turn(model: ChatOpenAI) -> None:
    """Have a tool called, send its result back, and stream the answer."""
    messages = [HumanMessage("How is the weather in Lima?")]
    messages.append(model.bind_tools([weather], tool_choice="any").invoke(messages))
    messages += [weather.invoke(call) for call in messages[-1].tool_calls]
    assert isinstance(messages[-1], ToolMessage) and "sunny" in messages[-1].content
    assert "".join(chunk.text for chunk in model.bind_tools([weather], temperature=0).stream(messages))


@step
def the_documented_lines() -> None:
    exec(documented("ChatOpenAI", CHAT))


@step
def chat() -> None:
    answer = chat_model.invoke([("system", "You answer in a sentence."), ("human", QUESTION)])
    assert "Paris" in answer.content and answer.usage_metadata["output_tokens"] > 1


@step
def stream() -> None:
    assert "Paris" in "".join(chunk.text for chunk in chat_model.stream(QUESTION))


@step
def batch() -> None:
    assert all("Paris" in answer.content for answer in chat_model.batch([QUESTION] * 3))


@step
def structured_output() -> None:
    assert isinstance(tools_model.with_structured_output(Forecast).invoke("Where?"), Forecast)


@step
def structured_output_by_a_call() -> None:
    model = tools_model.with_structured_output(Forecast, method="function_calling")
    assert isinstance(model.invoke("Where?"), Forecast)


@step
def tools_and_their_results() -> None:
    turn(tools_model)


@step
def tools_by_responses() -> None:
    turn(ChatOpenAI(**TOOLS_MODEL, use_responses_api=True))
