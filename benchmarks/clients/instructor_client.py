"""instructor: objects in each of its modes for OpenAI's API, and streams of their parts."""

from __future__ import annotations

import instructor
import openai
from checks import QUESTION, run_checks, server_url
from instructor.core import IncompleteOutputException
from pydantic import BaseModel, ConfigDict, Field

URL = server_url()
MODEL = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").models.list().data[0].id
OPTIONS = {"model": MODEL, "messages": QUESTION, "max_retries": 0, "temperature": 0}
FENCED = r'```json\n\{"setup": "[a-z ]{1,16}", "rating": [1-9]\}\n```'
"""MD_JSON leaves the form to the model; a small one needs a regular expression to keep to it."""


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=16)
    rating: int = Field(ge=1, le=10)


class Anything(BaseModel):
    """An object with any keys: JSON mode promises no more."""

    model_config = ConfigDict(extra="allow")


def asking(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


def create(mode: instructor.Mode, **fields: object) -> str:
    joke = asking(mode).create(**OPTIONS, response_model=Joke, **fields)
    assert isinstance(joke, Joke)
    return "a pydantic object"


def json_mode() -> str:
    try:
        found = asking(instructor.Mode.JSON).create(**OPTIONS, response_model=Anything, max_tokens=300)
    except IncompleteOutputException as error:
        text = error.last_completion.choices[0].message.content
        assert error.last_completion.usage.completion_tokens == 300 and text.lstrip().startswith("{")
        return "the beginning of an object, and an error that says that it was cut"
    assert isinstance(found, Anything)
    return "a pydantic object"


def partial(mode: instructor.Mode) -> str:
    parts = list(asking(mode).create_partial(**OPTIONS, response_model=Joke))
    assert 1 <= parts[-1].rating <= 10
    return f"{len(parts)} states of an object"


run_checks(
    "instructor",
    {
        "JSON_SCHEMA": lambda: create(instructor.Mode.JSON_SCHEMA),
        "TOOLS": lambda: create(instructor.Mode.TOOLS),
        "JSON": json_mode,
        "MD_JSON": lambda: create(instructor.Mode.MD_JSON, extra_body={"structured_outputs": {"regex": FENCED}}),
        "RESPONSES_TOOLS": lambda: create(instructor.Mode.RESPONSES_TOOLS),
        "JSON_SCHEMA, partial": lambda: partial(instructor.Mode.JSON_SCHEMA),
        "TOOLS, partial": lambda: partial(instructor.Mode.TOOLS),
    },
)
