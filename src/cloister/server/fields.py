"""Fields of the OpenAI API whose effect this server does not have: refused unless they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cloister.server.errors import invalid


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a field is refused, and the values that ask for nothing and pass (null always does).

    Attributes:
        why: half a sentence, after "is refused: ".
    """

    why: str
    harmless: tuple[object, ...] = ()


_TOOLS: Final = "this older form of tool calling is not available; use `tools` and `tool_choice`"
_TEXT: Final = "models here read and write text only"

REFUSED: Final[Mapping[str, Refused]] = {
    "functions": Refused(_TOOLS, ([],)),
    "function_call": Refused(_TOOLS, ("none",)),
    "modalities": Refused(_TEXT, (["text"],)),
    "audio": Refused(_TEXT),
    "prediction": Refused("predicted outputs are not available"),
    "web_search_options": Refused("this server does not search the web"),
    "chat_template": Refused("the template is the model's own; a client's would run here as a program"),
    "verbosity": Refused("models here have no verbosity levels", ("medium",)),
    "moderation": Refused("this server does not moderate"),
    "store": Refused("nothing is kept here, so there is nothing to store in", (False,)),
    "service_tier": Refused("a request's class comes from its API key", ("auto", "default")),
}


def refuse_unsupported(body: Mapping[str, Any], refused: Mapping[str, Refused] = REFUSED) -> dict[str, Any]:
    """Returns the body without the fields of `refused`.

    Raises:
        InvalidRequestError: one of them asks for something.
    """
    for name, value in body.items():
        entry = refused.get(name)
        if entry is not None and value is not None and not _is_one_of(value, entry.harmless):
            raise invalid(f"`{name}` is refused: {entry.why}. Leave it out.", param=name, code="unsupported_parameter")
    return {name: value for name, value in body.items() if name not in refused}


def _is_one_of(value: object, harmless: tuple[object, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in harmless)


# What clients of other servers ask for and this one does not have: one sentence each, in place of "no such route".


_OWN: Final = "what is served is the operator's affair"

ABSENT: Final[Mapping[str, str]] = {
    "/v1/audio": "There is no speech here: models of this server read and write text only.",
    "/v1/images": "There are no images here: models of this server read and write text only.",
    "/v1/videos": "There are no videos here: models of this server read and write text only.",
    "/v1/realtime": "There are no realtime sessions here: send requests to /v1/responses or /v1/chat/completions.",
    "/v1/moderations": "This server does not moderate.",
    "/v1/fine_tuning": f"This server trains no models: {_OWN}.",
    "/v1/assistants": "There are no assistants here: send the conversation to /v1/responses or /v1/chat/completions.",
    "/v1/threads": "There are no threads here: send the conversation to /v1/responses or /v1/chat/completions.",
    "/v1/vector_stores": "There are no vector stores here: /v1/embeddings makes the vectors.",
    "/v1/fim": "There is no such route: /v1/completions takes `suffix`, /infill and /api/generate fill in too.",
    "/v1/uploads": "There are no uploads in parts here: send the whole file to /v1/files.",
    "/classify": "There is no classifier here: models of this server have no classification head.",
    "/slots": "There are no slots to look into: what others ask is nobody's business. /metrics has counts.",
    "/api/create": f"This server makes no models: {_OWN}.",
    "/api/copy": f"This server copies no models: {_OWN}.",
    "/api/delete": f"This server deletes no models: {_OWN}.",
    "/api/push": f"This server publishes no models: {_OWN}.",
    "/api/blobs": f"This server takes no files of models: {_OWN}.",
}
"""Folder of the paths -> why there is nothing."""


def explain_absence(path: str) -> str:
    """Returns what to say of a path that leads nowhere."""
    found = next((why for folder, why in ABSENT.items() if f"{path}/".startswith(f"{folder}/")), None)
    return found or "There is no such route; the API begins with /v1."
