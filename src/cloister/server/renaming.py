"""Errors of a conversation in the words of the API that it came by: its fields have other names there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from cloister.server.middleware.ignored import renamed_fields
from cloister.types.errors import InvalidRequestError

RESPONSES: Final[Mapping[str, str]] = {
    r"messages": "input",
    r"max_tokens": "max_output_tokens",
    r"max_completion_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"(tools\[\d+\])\.function\.(\w+)": r"\1.\2",
    r"response_format\.json_schema\.(\w+)": r"text.format.\1",
    r"response_format": "text.format",
}
MESSAGES: Final[Mapping[str, str]] = {
    r"reasoning_effort": "thinking",
    r"stop": "stop_sequences",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[\d+\])\.function\.(\w+)": r"\1.\2",
    r"response_format\.json_schema\.(\w+)": r"output_config.format.\1",
}
_QUOTED: Final = re.compile(r"`([^`]*)`")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Names fields in errors that pass through as the client knows them.

    Args:
        names: a pattern of the whole name in /v1/chat/completions -> the name here.
    """
    try:
        with renamed_fields(lambda path: _rename(path, names)):
            yield
    except InvalidRequestError as error:
        error.message = _QUOTED.sub(lambda quoted: f"`{_rename(quoted[1], names)}`", error.message)
        error.param = None if error.param is None else _rename(error.param, names)
        raise


def _rename(name: str, names: Mapping[str, str]) -> str:
    for pattern, ours in names.items():
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    return name
