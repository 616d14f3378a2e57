"""An httpx transport that seals to one node and sends it there itself: the way without relay and gateway, for trials."""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from cloister.client.envelope import strip_request
from cloister.privacy.sealing import (
    CHUNKED,
    Content,
    Exchange,
    MessageReader,
    ResponseHead,
    ResponseOpener,
    bucket_bytes,
    choose_configuration,
    encode_request,
    parse_keys,
    seal_chunked_request,
)
from cloister.privacy.shape import Unshaper

NODE_PATH = "/ohttp"
KEYS_PATH = "/.well-known/ohttp-gateway"


class DirectTransport(httpx.AsyncBaseTransport):
    """Seals every request to the node at `url`, with the key that it publishes at the moment.

    Args:
        shaped: whether its profile promises a shape of answers.
    """

    def __init__(self, url: str, *, shaped: bool) -> None:
        self._url = url
        self._shaped = shaped
        self._way = httpx.AsyncHTTPTransport(verify=ssl.create_default_context(), limits=httpx.Limits(max_connections=64))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        keys = await self._pass("GET", KEYS_PATH, b"", request)
        target = request.url.raw_path
        fields = tuple((name.lower(), value) for name, value in request.headers.raw)
        inner = strip_request(request.method, target, fields, await request.aread(), time.time())
        message = encode_request(inner)
        sealed, exchange = seal_chunked_request(
            choose_configuration(parse_keys(await keys.aread())), message.ljust(bucket_bytes(len(message)), b"\0")
        )
        reply = await self._pass("POST", NODE_PATH, sealed, request)
        if reply.status_code != 200 or reply.headers.get("content-type") != CHUNKED.response_type:
            return reply
        opening = _Opening(exchange, reply, shaped=self._shaped)
        head = await opening.read_head()
        return httpx.Response(head.status, headers=list(head.fields), stream=opening)

    async def aclose(self) -> None:
        await self._way.aclose()

    async def _pass(self, method: str, path: str, content: bytes, like: httpx.Request) -> httpx.Response:
        headers = {"content-type": CHUNKED.request_type, "host": httpx.URL(self._url).netloc.decode()}
        asked: dict[str, Any] = {"content": content} if content else {}
        outgoing = httpx.Request(method, self._url + path, headers=headers, extensions=like.extensions, **asked)
        return await self._way.handle_async_request(outgoing)


class _Opening(httpx.AsyncByteStream):
    """The content of a sealed answer while it arrives."""

    def __init__(self, exchange: Exchange, reply: httpx.Response, *, shaped: bool) -> None:
        self._reply = reply
        self._chunks, self._message, self._unshaper = ResponseOpener(exchange), MessageReader(), Unshaper(required=shaped)
        assert isinstance(reply.stream, httpx.AsyncByteStream)
        self._pieces = aiter(reply.stream)
        self._head: ResponseHead | None = None
        self._waiting: list[bytes] = []
        self._is_over = False

    async def read_head(self) -> ResponseHead:
        """Reads until the head is there.

        Raises:
            httpx.RemoteProtocolError: the answer ended before.
        """
        while self._head is None:
            await self._read()
            if self._is_over and self._head is None:
                raise httpx.RemoteProtocolError("the sealed answer has no head")
        return self._head

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            for content in self._waiting:
                yield content
            self._waiting.clear()
            if self._is_over:
                return
            await self._read()

    async def aclose(self) -> None:
        await self._reply.aclose()

    async def _read(self) -> None:
        piece = await anext(self._pieces, None)
        if piece is None:
            self._is_over = True
            self._take(self._chunks.close())
            self._unshaper.close()
        else:
            for plain in self._chunks.feed(piece):
                self._take(plain)

    def _take(self, plain: bytes) -> None:
        for part in self._message.feed(self._unshaper.feed(plain)):
            if isinstance(part, ResponseHead) and part.is_final:
                self._head = part
            elif isinstance(part, Content) and part.data:
                self._waiting.append(part.data)
