"""What a token pays for, through relay, gateway and node, to a real engine: an answer ends where its token does."""

from __future__ import annotations

import json

from cloister.trust.sealing import HttpRequest, RequestHead
from tests.private.messages import ask
from tests.private.real_server import RealServer
from tests.sealed_cloud import open_cloud

FIELDS = ((b"content-type", b"application/json"),)


def test_an_answer_that_wants_more_than_its_token_pays_for_ends_with_length() -> None:
    server = RealServer()
    with open_cloud(server, budget=7) as cloud:
        try:
            for max_tokens, expected in ((3, 3), (50, 7), (None, 7)):
                body: dict[str, object] = {"model": "cloister-5m", "prompt": "Once upon a time", "ignore_eos": True}
                if max_tokens is not None:
                    body["max_tokens"] = max_tokens
                opening = ask(
                    cloud,
                    HttpRequest(RequestHead("POST", "https", "node", "/v1/completions", FIELDS), json.dumps(body).encode()),
                )
                answer = json.loads(opening.content)
                assert answer["usage"]["completion_tokens"] == expected
                assert answer["choices"][0]["finish_reason"] == "length"
        finally:
            server.close()
