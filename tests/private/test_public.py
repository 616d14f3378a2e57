"""Files that are the same for all who ask, and what is said when the one who has them is gone."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from cloister.private.serving import File
from cloister.private.workers.key_service_client import RemoteUnsealer
from cloister.trust.sealing import KEYS_MEDIA_TYPE


def test_keys_of_a_key_service_that_cannot_be_reached_are_refused_and_are_no_mistake_of_the_server() -> None:
    app = Starlette(routes=[Route("/keys", File(RemoteUnsealer().publish, KEYS_MEDIA_TYPE))])
    reply = TestClient(app).get("/keys")
    assert reply.status_code == 503
    assert "key service" in reply.json()["title"]
