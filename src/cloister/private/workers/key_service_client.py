"""The workers' and the front's client of the key service: an `Unsealer` over a channel."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import msgspec

from cloister.private.unsealing import PublicKeys
from cloister.private.workers.key_service import CACHE_FULL, MESSAGE_BYTES, KeyServiceAnswer, Question
from cloister.trust.sealing import Form, Header, OhttpContext, ReplayCacheFullError, UnsealError
from cloister.trust.sealing.hpke import Context, ContextSecrets, Suite
from cloister.types.errors import EngineError

ANSWER_TIMEOUT_S: Final = 10.0


class RemoteUnsealer:
    """Sends questions to a key service, one at a time.

    Attributes:
        is_silent: the last question got no answer in time.
    """

    def __init__(self) -> None:
        self._sock: socket.socket | None = None
        self._turn = asyncio.Lock()
        self._num_asked = 0
        self.is_silent = False

    def attach(self, sock: socket.socket) -> None:
        """Takes a channel."""
        sock.setblocking(False)
        self._sock = sock

    async def publish(self) -> bytes:
        return (await self._ask(Question("publish"))).keys

    async def publish_all(self) -> PublicKeys:
        answer = await self._ask(Question("publish"))
        return PublicKeys(answer.keys, answer.receipt_key)

    async def begin(self, header: Header, form: Form) -> OhttpContext:
        answer = await self._ask(Question("begin", header.encode(), form.request_type))
        suite = Suite(answer.kdf_id, answer.aead_id)
        secrets = ContextSecrets(answer.kem_id, suite, answer.key, answer.base_nonce, answer.exporter)
        return OhttpContext(form, header, Context(secrets))

    async def accept(self, header: Header) -> None:
        await self._ask(Question("accept", header.encode()))

    async def sign(self, header: Header, message: bytes) -> bytes:
        return (await self._ask(Question("sign", header.encode(), message=message))).signature

    async def _ask(self, question: Question) -> KeyServiceAnswer:
        loop = asyncio.get_running_loop()
        if self._sock is None:
            raise EngineError("the key service has not been reached")
        try:
            async with self._turn, asyncio.timeout(ANSWER_TIMEOUT_S):
                self._num_asked += 1
                question = msgspec.structs.replace(question, number=self._num_asked)
                await loop.sock_sendall(self._sock, msgspec.msgpack.encode(question))
                answer = await self._receive(self._sock)
        except TimeoutError:
            self.is_silent = True
            raise EngineError(
                f"the key service did not answer within {ANSWER_TIMEOUT_S:.0f} s; send the request again"
            ) from None
        except OSError:
            answer = None
        if answer is None:
            raise EngineError("the key service has ended; the node has to be restarted")
        self.is_silent = False
        if answer.error == CACHE_FULL:
            raise ReplayCacheFullError("The receiver has as many requests as it can keep apart; try again in a moment.")
        if answer.error:
            raise UnsealError
        return answer

    async def _receive(self, sock: socket.socket) -> KeyServiceAnswer | None:
        """Returns the answer to the last question, and drops late ones to earlier questions. None if there will be none."""
        loop = asyncio.get_running_loop()
        while said := await loop.sock_recv(sock, MESSAGE_BYTES):
            answer = msgspec.msgpack.decode(said, type=KeyServiceAnswer)
            if answer.number == self._num_asked:
                return answer
        return None
