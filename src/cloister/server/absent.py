"""What clients of other servers ask for and this one does not have: one sentence each, in place of "no such route"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
