"""A link delivers every message once and in order over whatever carries its frames, or is lost on both sides."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.cluster.link import (
    MAX_EARLY,
    RESET,
    Link,
    LinkError,
    LinkFrame,
    LinkServer,
    LinkTimes,
    decode_frame,
    encode_frame,
)

TIMES = LinkTimes(resend_s=0.2, max_resend_s=1.0, keepalive_s=1.0, lost_s=5.0)


class Carrier:
    """A client, a server, and frames on their way, which arrive as the test says."""

    def __init__(self, session: int = 7, times: LinkTimes = TIMES) -> None:
        self.now = 0.0
        self.client = Link(session, 0.0, times=times)
        self.server = LinkServer(times=times)
        self.to_server: list[bytes] = []
        self.to_client: list[bytes] = []
        self.at_server: list[bytes] = []
        self.at_client: list[bytes] = []

    def poll(self) -> None:
        self.to_server += map(encode_frame, self.client.poll(self.now))
        if self.server.link is not None:
            self.to_client += map(encode_frame, self.server.link.poll(self.now))

    def arrive_at_server(self, data: bytes) -> None:
        messages, replies = self.server.receive(decode_frame(data), self.now)
        self.at_server += messages
        self.to_client += map(encode_frame, replies)

    def arrive_at_client(self, data: bytes) -> None:
        self.at_client += self.client.receive(decode_frame(data), self.now)

    def exchange(self) -> None:
        """Everything that is due is sent and arrives."""
        for _ in range(4):
            self.poll()
            while self.to_server:
                self.arrive_at_server(self.to_server.pop(0))
            while self.to_client:
                self.arrive_at_client(self.to_client.pop(0))


def connected() -> Carrier:
    carrier = Carrier()
    carrier.exchange()
    assert carrier.server.link is not None
    return carrier


def server_link(carrier: Carrier) -> Link:
    assert carrier.server.link is not None
    return carrier.server.link


@given(seed=st.integers(0, 2**32), loses=st.sampled_from((0.0, 0.2, 0.5)), num_messages=st.integers(0, 30))
def test_messages_arrive_once_and_in_order_though_frames_are_lost_repeated_and_reordered(
    seed: int, loses: float, num_messages: int
) -> None:
    draw, carrier = random.Random(seed), Carrier(times=LinkTimes(lost_s=1e9))
    sent = [b"%d" % number for number in range(num_messages)]
    for number in range(2000):
        if number < num_messages:
            carrier.client.send(sent[number])
            if carrier.server.link is not None:
                server_link(carrier).send(b"reply")
        carrier.poll()
        for frames, arrive in ((carrier.to_server, carrier.arrive_at_server), (carrier.to_client, carrier.arrive_at_client)):
            draw.shuffle(frames)
            for _ in range(draw.randrange(3)):
                if frames and draw.random() >= loses:
                    arrive(frames[-1] if draw.random() < 0.2 else frames.pop())
                elif frames:
                    frames.pop()
        carrier.now += 0.05
        assert not carrier.client.is_lost
        link = carrier.server.link
        if number > num_messages and link is not None and not (carrier.client.has_unread or link.has_unread):
            break
    assert carrier.at_server == sent
    assert set(carrier.at_client) <= {b"reply"}


def test_an_idle_link_lives_and_a_cut_one_is_lost_on_both_sides() -> None:
    carrier = connected()
    for _ in range(60):
        carrier.now += 0.25
        carrier.exchange()
    assert not carrier.client.is_lost
    assert not server_link(carrier).is_lost
    for _ in range(21):
        carrier.now += 0.25
        carrier.poll()
    assert carrier.client.is_lost
    assert server_link(carrier).is_lost
    assert carrier.client.poll(carrier.now) == []


def test_a_cut_shorter_than_the_limit_loses_nothing() -> None:
    carrier = connected()
    carrier.client.send(b"before")
    for _ in range(16):
        carrier.now += 0.25
        carrier.poll()
        carrier.to_server.clear()
        carrier.to_client.clear()
    carrier.client.send(b"after")
    carrier.now += 0.75
    carrier.exchange()
    carrier.now += 1.0
    carrier.exchange()
    assert carrier.at_server == [b"before", b"after"]
    assert not carrier.client.is_lost


def test_frames_of_an_earlier_session_do_nothing_in_a_later_one() -> None:
    carrier = connected()
    carrier.client.send(b"old")
    carrier.poll()
    late = list(carrier.to_server)
    carrier.to_server.clear()
    carrier.client = Link(8, carrier.now, times=TIMES)
    carrier.client.send(b"new")
    carrier.exchange()
    assert carrier.at_server == [b"new"]
    served = server_link(carrier)
    carrier.arrive_at_server(encode_frame(LinkFrame(7, 0)))  # its first frame, repeated
    for data in late:
        carrier.arrive_at_server(data)
    assert carrier.at_server == [b"new"]
    assert carrier.server.link is served
    assert not served.is_lost


def test_a_server_that_started_again_ends_the_session_at_once() -> None:
    carrier = connected()
    carrier.server = LinkServer(times=TIMES)
    carrier.client.send(b"hello?")
    carrier.exchange()
    assert carrier.client.is_lost
    assert carrier.at_server == []


def test_a_reset_ends_the_session_and_gets_no_reply() -> None:
    carrier = connected()
    carrier.arrive_at_server(encode_frame(carrier.client.reset()))
    assert server_link(carrier).is_lost
    carrier.to_client.clear()
    carrier.arrive_at_server(encode_frame(LinkFrame(99, 98, RESET)))
    carrier.arrive_at_server(encode_frame(LinkFrame(99, 0, RESET)))
    assert carrier.to_client == []


def test_a_link_whose_other_side_does_not_read_is_lost_and_keeps_no_more() -> None:
    link = Link(1, 0.0, times=TIMES, max_unread=10)
    for _ in range(10):
        link.send(b"x")
    assert not link.is_lost
    link.send(b"one more")
    assert link.is_lost


def test_payloads_far_ahead_are_dropped_and_not_kept() -> None:
    carrier = connected()
    token = server_link(carrier)._token
    for number in range(2, 2 * MAX_EARLY):
        carrier.arrive_at_server(encode_frame(LinkFrame(7, token, number, 0, b"x")))
    assert len(server_link(carrier)._early) <= MAX_EARLY
    assert carrier.at_server == []


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x95\x01", encode_frame(LinkFrame(1, 2))[:-1], b"\x95\xa1a\x00\x00\x00\xc4\x00"]
)
def test_what_is_no_frame_raises_one_error(data: bytes) -> None:
    with pytest.raises(LinkError, match="something that is not a frame"):
        decode_frame(data)
