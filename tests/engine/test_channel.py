"""Frames: whole, bounded, and nothing but messages."""

from __future__ import annotations

import asyncio
import socket

import msgspec
import pytest

from cloister.engine import channel
from cloister.types.events import (
    Abort,
    FrontMessage,
    HoldKV,
    KVLoaded,
    KVSource,
    Outputs,
    PrefetchKV,
    PrefillDone,
    Ready,
    Shutdown,
    Submit,
)
from cloister.types.request import ModelInfo, SamplingParams
from tests.engine.replica import make_request


def test_every_message_of_the_front_survives_the_way() -> None:
    request = make_request(stop=("a", "b"), logit_bias={3: -1.5}, seed=7)
    source = KVSource("unix:abc")
    messages: list[FrontMessage] = [
        Submit(request),
        Submit(request, kv_source=source, hold_kv_s=2.5, prefill_only=True),
        HoldKV("x", 1.5),
        PrefetchKV(request, [1, 2, 3], source),
        Abort("x"),
        Shutdown(1.5),
    ]
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"".join(channel.frame(message) for message in messages))
        near.shutdown(socket.SHUT_WR)
        received = []
        while (frame := channel.receive_blocking(far)) is not None:
            received.append(channel.decode_front(frame))
    assert received == messages


def test_events_of_kv_on_the_move_survive_the_way() -> None:
    message = Outputs([], [KVLoaded("x", 1.0, 32, 4096, 0.25, complete=False), PrefillDone("x", 2.0, (3,), 16)])
    assert channel.decode_engine(channel.encode(message)) == message


def test_a_frame_cut_short_is_the_end() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(channel.frame(Abort("a request"))[:-3])
        near.shutdown(socket.SHUT_WR)
        assert channel.receive_blocking(far) is None


def test_frames_that_arrive_byte_by_byte_are_put_together() -> None:
    async def receive() -> bytes | None:
        reader = asyncio.StreamReader()
        for byte in channel.frame(Abort("a request")):
            asyncio.get_running_loop().call_soon(reader.feed_data, bytes([byte]))
        return await asyncio.wait_for(channel.receive(reader), 300.0)

    frame = asyncio.run(receive())
    assert frame is not None
    assert channel.decode_front(frame) == Abort("a request")


def test_a_frame_over_the_limit_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    message = Submit(make_request("x" * 1000))
    near, far = socket.socketpair()
    with near, far:
        near.sendall(channel.frame(message))
        monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 100)
        with pytest.raises(channel.ChannelError, match="limit of 100"):
            channel.receive_blocking(far)
        with pytest.raises(channel.ChannelError, match="limit of 100"):
            channel.frame(message)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"type": "Obey"})])
def test_what_is_no_message_is_not_taken_for_one(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        channel.decode_front(payload)


def test_the_directions_do_not_mix() -> None:
    info = ModelInfo(name="m", path="", max_model_len=1, vocab_size=1, eos_token_ids=())
    with pytest.raises(msgspec.MsgspecError):
        channel.decode_front(channel.frame(Ready(info, []))[4:])


def test_defaults_cost_no_bytes() -> None:
    assert len(msgspec.msgpack.encode(SamplingParams())) < 10
