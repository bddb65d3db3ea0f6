"""instructor: objects of a type, by tools and by JSON schemas, whole and streamed."""

from typing import Literal

import instructor
import openai
from pydantic import BaseModel
from steps import TOOLS_V1, package, step

package("instructor")

MESSAGES = [{"role": "user", "content": "How is the weather?"}]
ASKED = {"model": "tools", "messages": MESSAGES, "max_tokens": 300}


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Oslo", "Lima"]
    days: Literal[1, 2, 3]


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=TOOLS_V1, api_key="none"), mode=mode)


def create(mode: instructor.Mode) -> None:
    assert isinstance(client(mode).chat.completions.create(response_model=Weather, **ASKED), Weather)


@step
def tools() -> None:
    create(instructor.Mode.TOOLS)


@step
def strict_tools() -> None:
    create(instructor.Mode.TOOLS_STRICT)


@step
def json_schema() -> None:
    create(instructor.Mode.JSON_SCHEMA)


@step
def responses_tools() -> None:
    create(instructor.Mode.RESPONSES_TOOLS)


@step
def partial_stream() -> None:
    parts = list(client(instructor.Mode.TOOLS).chat.completions.create_partial(response_model=Weather, **ASKED))
    assert parts[-1].city in ("Oslo", "Lima") and parts[-1].days in (1, 2, 3)
