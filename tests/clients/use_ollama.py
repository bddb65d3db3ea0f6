"""The ollama package: generate, chats, streams, formats, tools, what is told of the model, and its errors."""

import json
from typing import Literal

import httpx
import ollama
from pydantic import BaseModel
from steps import CHAT, CHAT_V1, QUESTION, TOOLS, package, step

package("ollama")

chat, tools = (ollama.Client(host=url) for url in (CHAT, TOOLS))
MESSAGES = [{"role": "user", "content": QUESTION}]
SHORT = {"temperature": 0, "num_predict": 24, "num_ctx": 2048, "num_gpu": 0}
CALL = {"model": "tools", "messages": [{"role": "user", "content": "How is the weather?"}], "options": SHORT}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]
    days: Literal[1, 2, 3]


def weather(city: str) -> str:
    """Tell the weather of a city.

    Args:
        city: the name of the city.
    """
    return f"sunny in {city}"


@step
def generate() -> None:
    answer = chat.generate("smollm2", QUESTION, system="You answer in a sentence.", options=SHORT, keep_alive="5m")
    assert "Paris" in answer.response and answer.done and answer.done_reason in ("stop", "length")
    assert answer.eval_count > 1 and answer.total_duration >= answer.eval_duration > 0


@step
def generate_streamed() -> None:
    whole = chat.generate("smollm2:latest", QUESTION, options=SHORT).response
    pieces = [*chat.generate("smollm2:latest", QUESTION, options=SHORT, stream=True)]
    assert "".join(piece.response for piece in pieces) == whole and len(pieces) > 2 and pieces[-1].prompt_eval_count


@step
def raw() -> None:
    body = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 24}
    twin = httpx.post(f"{CHAT_V1}/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert chat.generate("smollm2", body["prompt"], raw=True, options=SHORT).response == twin


@step
def chat_and_stream() -> None:
    answer = chat.chat("smollm2", MESSAGES, options=SHORT, think=False)
    assert "Paris" in answer.message.content
    pieces = chat.chat("smollm2", MESSAGES, options=SHORT, stream=True)
    assert "".join(piece.message.content for piece in pieces) == answer.message.content


@step
def structured_output() -> None:
    answer = tools.chat(**CALL | {"options": {}}, format=Weather.model_json_schema())
    assert Weather.model_validate_json(answer.message.content)
    answer = chat.chat("smollm2", MESSAGES, format="json", options={**SHORT, "num_predict": 200})
    assert isinstance(json.loads(answer.message.content), dict)


@step
def tools_and_their_results() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [*CALL["messages"], {"role": "assistant", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_name": "weather", "content": "sunny"})
    offered = tools.chat(**CALL, tools=[weather])
    answered = tools.chat(**CALL | {"messages": messages}, tools=[weather])
    assert answered.prompt_eval_count > offered.prompt_eval_count > 100


@step
def model() -> None:
    assert [each.model for each in chat.list().models] == ["smollm2:latest"]
    told = chat.show("smollm2")
    assert "completion" in told.capabilities and told.modelinfo["general.architecture"] == told.details.family
    assert "tools" in tools.show("tools").capabilities
    (running,) = chat.ps().models
    assert running.context_length >= 2048 and running.size > 0
    assert chat.generate("smollm2").done_reason == "load"


@step
def errors() -> None:
    for ask, status in (
        (lambda: chat.generate("llama3.2", "a"), 404),
        (lambda: chat.generate("smollm2", "a", options={"mirostat": 1}), 400),
        (lambda: chat.embed("smollm2", "a"), 501),
        (lambda: chat.pull("smollm2"), 501),
        (lambda: chat.delete("smollm2"), 501),
    ):
        found = 0
        try:
            ask()
        except ollama.ResponseError as error:
            found = error.status_code
        assert found == status
