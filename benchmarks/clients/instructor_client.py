"""instructor: objects by JSON schema, by tools and by JSON mode, lists of them, and streams of their parts."""

from __future__ import annotations

import instructor
import openai
from checks import QUESTION, run_checks, server_url
from pydantic import BaseModel, Field

URL = server_url()
MODEL = openai.OpenAI(base_url=f"{URL}/v1", api_key="none").models.list().data[0].id


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=16)
    rating: int = Field(ge=1, le=10)


def asking(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode)


def create(mode: instructor.Mode) -> str:
    joke = asking(mode).create(model=MODEL, messages=QUESTION, response_model=Joke, max_retries=0, temperature=0)
    assert isinstance(joke, Joke)
    return "a pydantic object"


def partial() -> str:
    mode = instructor.Mode.JSON_SCHEMA
    parts = list(asking(mode).create_partial(model=MODEL, messages=QUESTION, response_model=Joke, max_retries=0, temperature=0))
    assert 1 <= parts[-1].rating <= 10
    return f"{len(parts)} states of an object"


run_checks(
    "instructor",
    {
        "JSON_SCHEMA": lambda: create(instructor.Mode.JSON_SCHEMA),
        "TOOLS": lambda: create(instructor.Mode.TOOLS),
        "JSON_SCHEMA, partial": partial,
    },
)
