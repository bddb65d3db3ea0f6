"""LlamaIndex's OpenAILike: chats, completions, streams, structured outputs, tools."""

from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from steps import CHAT_V1, QUESTION, TOOLS_V1, package, step

package("llama-index-llms-openai-like")

chat_model = OpenAILike(
    model="smollm2", api_base=CHAT_V1, api_key="none", is_chat_model=True, temperature=0, max_tokens=24
)
tools_model = OpenAILike(
    model="tools",
    api_base=TOOLS_V1,
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=1,
    max_tokens=200,
)
ASKED = [ChatMessage(role="system", content="You answer in a sentence."), ChatMessage(role="user", content=QUESTION)]


class Forecast(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]


def weather(city: Literal["Oslo", "Lima"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


@step
def chat() -> None:
    assert "Paris" in chat_model.chat(ASKED).message.content


@step
def stream() -> None:
    assert "Paris" in "".join(part.delta or "" for part in chat_model.stream_chat(ASKED))


@step
def complete() -> None:
    model = OpenAILike(model="smollm2", api_base=CHAT_V1, api_key="none", temperature=0, max_tokens=8)
    assert "4" in model.complete("1, 2, 3,").text and list(model.stream_complete("1, 2, 3,"))[-1].text


@step
def structured_output() -> None:
    model = tools_model.model_copy(update={"should_use_structured_outputs": True})
    assert isinstance(model.as_structured_llm(Forecast).complete("Where?").raw, Forecast)


@step
def structured_output_by_a_call() -> None:
    assert isinstance(tools_model.as_structured_llm(Forecast).complete("Where?").raw, Forecast)


@step
def tools_and_their_results() -> None:
    tool = FunctionTool.from_defaults(fn=weather)
    turns = [ChatMessage(role="user", content="How is the weather in Lima?")]
    answer = tools_model.chat_with_tools([tool], chat_history=turns, tool_required=True)
    call = tools_model.get_tool_calls_from_response(answer)[0]
    told, of = weather(**call.tool_kwargs), {"tool_call_id": call.tool_id}
    turns += [answer.message, ChatMessage(role="tool", content=told, additional_kwargs=of)]
    assert list(tools_model.stream_chat_with_tools([tool], chat_history=turns, temperature=0))[-1].message.content
