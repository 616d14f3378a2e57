"""The proxy refuses requests of web pages, also those without an `Origin`: images, scripts and links."""

from __future__ import annotations

import httpx
import pytest

from cloister.client.proxy import proxy_app

IMAGE = {
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "no-cors",
    "sec-fetch-dest": "image",
    "referer": "https://evil.example/",
}
LINK = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
SAME = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
OLD = {"referer": "https://evil.example/page", "user-agent": "Mozilla/5.0"}


class Carried(Exception):
    pass


async def ask(headers: dict[str, str]) -> int:
    from cloister.client.proxy import Proxy

    class Session:
        believed = None

    class Transport:
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            raise Carried

    app = proxy_app(Proxy(Session(), Transport(), print))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8080") as client:
        return (await client.get("/v1/models", headers=headers)).status_code


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("headers", [IMAGE, LINK, SAME, OLD])
async def test_what_a_page_asks_for_is_refused_though_it_names_no_origin(headers: dict[str, str], anyio_backend: str) -> None:
    try:
        status = await ask(headers)
    except Carried:
        pytest.fail("a request of a page was sealed, and a token was spent")
    assert status == 403


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(
    "headers", [{}, {"user-agent": "python-httpx"}, {"sec-fetch-mode": "cors"}, {"sec-fetch-site": "none"}]
)
async def test_programs_are_carried_node_s_fetch_among_them(headers: dict[str, str], anyio_backend: str) -> None:
    with pytest.raises(Carried):
        await ask(headers)
