"""Images in the profile `private`: the answer of any server, refusals behind the seal, and nothing to see from outside."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from cloister.client import Limits, SealedTransport, sealed_call
from cloister.client.errors import ImagesRefusedError
from cloister.client.images import check_images, has_images
from cloister.private.workers.image_decoder import ForkedDecoder
from cloister.server.image_child import HEAD, NO_FAULT, UNKNOWN_FORMAT
from cloister.trust.shape import SIZE_CLASSES, Shaper, TrafficShape, shape_for_request, shape_of
from cloister.types.errors import ConfigError
from tests.private.real_server import RealServer
from tests.sealed_cloud import LoopbackCloud, open_cloud
from tests.server.running_server import serving
from tests.server.test_images import OTHER, PNG, asks, part, start
from tests.vision_factory import make_vision_model

FAST = TrafficShape(frame_bytes=512, tick_s=0.001, constant=False)
"""As `private` has it, five times as fast: answers of the class `small` last a second."""
SETTINGS: dict[str, Any] = {"backend": "torch", "dtype": "float32", "max_model_len": 400, "kv_memory_mb": 8, "block_size": 8}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model") / "seeing")


@pytest.fixture(scope="module")
def cloud(path: Path) -> Iterator[LoopbackCloud]:
    server = RealServer(model=str(path), max_num_seqs=4, speculate="none", **SETTINGS)
    with open_cloud(server, shape=FAST) as cloud:
        yield cloud
        server.close()


def connect(cloud: LoopbackCloud, size_class: str | None) -> openai.OpenAI:
    transport = SealedTransport(cloud.session(size_class=size_class, limits=Limits(most_share=1.0)))
    http = httpx.Client(transport=transport)
    return openai.OpenAI(base_url="https://cloister/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture(scope="module")
def client(cloud: LoopbackCloud) -> Iterator[openai.OpenAI]:
    with connect(cloud, "small") as client:
        yield client


def say(client: openai.OpenAI, messages: Any, **fields: Any) -> str:
    model = fields.pop("model", "seeing")
    reply = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, **fields)
    return str(reply.choices[0].message.content)


def test_a_sealed_image_gets_the_answer_of_a_plain_server(client: openai.OpenAI, cloud: LoopbackCloud, path: Path) -> None:
    shown = {"one": [part(PNG)], "other": [part(OTHER)], "none": []}
    found = {name: say(client, asks(*parts)) for name, parts in shown.items()}
    with serving(path, lambda: start(path)) as plain, openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none") as direct:
        wanted = {name: say(direct, asks(*parts)) for name, parts in shown.items()}
    assert found == wanted
    assert len(set(found.values())) == 3


NUM_TRIES = 20
"""A busy machine may need more time for an answer than the shortest one lasts."""


def observe(client: openai.OpenAI, cloud: LoopbackCloud, *images: bytes, good: bool = True) -> tuple[int, int, list[int]]:
    """Asks; returns the bytes that the relay and the node took, and those of each frame of the answer."""
    for _ in range(NUM_TRIES):
        with contextlib.nullcontext() if good else pytest.raises(openai.BadRequestError):
            say(client, asks(*map(part, images)))
        client._client._transport.close()  # type: ignore[attr-defined]  # waits for the padding
        node, relay = cloud.node.posts()[-1], cloud.relay.posts()[-1]
        if len(node.pieces) == SIZE_CLASSES["small"].least_frames:
            return len(relay.request), len(node.request), [len(piece) for _, piece in node.pieces]
    raise AssertionError(f"the answer has {len(node.pieces)} frames whenever it is asked for")


def test_a_request_with_an_image_looks_like_one_without(client: openai.OpenAI, cloud: LoopbackCloud) -> None:
    text = observe(client, cloud)
    assert observe(client, cloud, PNG) == text
    assert observe(client, cloud, PNG, OTHER) == text
    assert observe(client, cloud, b"no image", good=False) == text


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64," + "AAAA" * 20, "is none of PNG"),
        ("https://pictures.example/cat.png", "not a data URL"),
    ],
)
def test_a_bad_image_is_refused_in_one_line_behind_the_seal(
    url: str, says: str, client: openai.OpenAI, cloud: LoopbackCloud, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(openai.BadRequestError, match=says) as refused:
        say(client, asks({"type": "image_url", "image_url": {"url": url}}))
    message = refused.value.body["message"]  # type: ignore[index]
    assert "\n" not in message
    assert url[-30:] not in message + caplog.text
    assert {record.posts()[-1].status for record in (cloud.relay, cloud.gateway, cloud.node)} == {200}


def test_without_a_size_class_nothing_is_sent(cloud: LoopbackCloud) -> None:
    num_asked = cloud.num_asked
    with connect(cloud, None) as client:
        with pytest.raises(ImagesRefusedError, match="size_class"):
            say(client, asks(part(PNG)))
        assert cloud.num_asked == num_asked
        assert say(client, asks()), "text needs none"
    with pytest.raises(ConfigError, match="small, medium, large"):
        cloud.session(size_class="tiny")


def test_a_client_that_pads_too_little_is_refused_by_the_node(cloud: LoopbackCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_call, "check_images", lambda *_: None)
    with connect(cloud, None) as client, pytest.raises(openai.BadRequestError, match="size class") as refused:
        say(client, asks(part(PNG)))
    assert refused.value.code == "no_size_class"


def test_the_verified_profile_decides_before_anything_is_sent() -> None:
    body = b'{"messages": [{"role": "user", "content": [{"type": "\\u0069mage_url"}]}]}'
    assert has_images(body)
    assert not has_images(b'{"messages": "an image_url in words"}')
    assert not has_images(b"image, and no JSON")
    with pytest.raises(ImagesRefusedError, match="paranoid"):
        check_images(body, "paranoid", SIZE_CLASSES["large"])
    with pytest.raises(ImagesRefusedError, match="size class"):
        check_images(body, "private", None)
    check_images(body, "private", SIZE_CLASSES["small"])
    check_images(body, "team", None)


# What a wire tells: recordings of answers, sent through the shapes on a virtual clock.


def draw_times(rng: random.Random, *, has_image: bool) -> list[float]:
    """Returns when the events of an answer are written: a tower takes 1 to 6 s, a prompt of text 0.02 to 2 s."""
    now_s = rng.uniform(1.0, 6.0) if has_image else rng.uniform(0.02, 2.0)
    times = []
    for _ in range(rng.randint(5, 60)):
        times.append(now_s)
        now_s += rng.uniform(0.01, 0.05)
    return times


def watch(shape: TrafficShape, times: Sequence[float], phase_s: float) -> list[tuple[float, int]]:
    """Returns when which sizes leave, counted from the request's arrival at a phase of the clock."""
    shaper, left, seen = Shaper(shape, phase_s), [phase_s + at for at in times], []
    while not shaper.is_over:
        due_s = shaper.due_s
        if left and (due_s is None or left[0] <= due_s):
            now_s = left.pop(0)
            shaper.write(b"data: {}\n\n", now_s, last=not left)
            continue
        assert due_s is not None
        frame = shaper.take(due_s)
        assert frame is not None
        seen.append((due_s - phase_s, len(frame.data)))
    return seen


def measure(seen: Sequence[tuple[float, int]]) -> list[float]:
    """Returns what a classifier may look at: first and last time, number, bytes, and how gaps are spread."""
    times = np.array([at for at, _ in seen])
    gaps = np.diff(times)
    num_bytes = sum(size for _, size in seen)
    return [times[0], times[-1], len(seen), num_bytes, gaps.max(), gaps.mean(), float(np.median(gaps)), gaps.std()]


def score(shape: TrafficShape) -> float:
    """Returns the area under the curve of the best of all thresholds on one measure: 0.5 is chance."""
    rng = random.Random(5)
    phases = [rng.uniform(0, 10) for _ in range(60)]
    rows = {
        has_image: np.array([measure(watch(shape, draw_times(rng, has_image=has_image), phase_s)) for phase_s in phases])
        for has_image in (False, True)
    }
    areas = []
    for column in range(rows[True].shape[1]):
        with_image, without = np.round(rows[True][:, column], 9), np.round(rows[False][:, column], 9)
        more = (with_image[:, None] > without[None]).mean() + (with_image[:, None] == without[None]).mean() / 2
        areas.append(max(more, 1 - more))
    return float(max(areas))


def test_a_classifier_finds_images_in_the_shape_of_texts() -> None:
    shape = shape_of("private")
    assert shape is not None
    assert score(shape) > 0.9


@pytest.mark.parametrize("drafts", [False, True])
def test_inside_a_size_class_a_classifier_finds_none(*, drafts: bool) -> None:
    shape = shape_for_request("private", shape_of("private", drafts=drafts), SIZE_CLASSES["small"].request_bytes)
    assert shape is not None
    assert score(shape) <= 0.55


def test_an_answer_that_lasts_longer_than_its_class_shows_it() -> None:
    shape = shape_for_request("private", shape_of("private"), SIZE_CLASSES["small"].request_bytes)
    assert shape is not None
    assert len(watch(shape, [9.0], 0.0)) == 1024
    assert len(watch(shape, [11.0], 0.0)) == 4096


def test_only_private_has_size_classes_and_smaller_requests_keep_their_shape() -> None:
    private, paranoid = shape_of("private"), shape_of("paranoid")
    assert shape_for_request("private", private, 2**16) is private
    assert shape_for_request("paranoid", paranoid, 2**22) is paranoid
    assert shape_for_request("open", None, 2**22) is None
    found = [shape_for_request("private", private, size) for size in (2**18, 2**20, 2**22, 2**24)]
    assert [shape and shape.least_frames for shape in found] == [1024, 4096, 16384, 16384]


# The process that decodes in a sealed node.


def test_a_forked_decoder_has_one_socket_and_reads_one_file_after_the_other() -> None:
    decoder = ForkedDecoder()
    with open("/proc/self/status", "rb"):
        decoder.fork()
    for data, size in ((PNG, (70, 40)), (OTHER, (30, 50))):
        answer = decoder.open().run(data)
        assert HEAD.unpack_from(answer) == (NO_FAULT, *size)
        assert len(answer) == HEAD.size + 3 * size[0] * size[1]
    assert HEAD.unpack_from(decoder.open().run(b"no image")) == (UNKNOWN_FORMAT, 0, 0)
    pid = decoder._pid
    assert len(os.listdir(f"/proc/{pid}/fd")) == 1 if os.access(f"/proc/{pid}/fd", os.R_OK) else True
    stopped = decoder.open()
    stopped.stop()
    os.waitpid(pid, 0)
    assert stopped.run(PNG) == b"", "it was ended"
    decoder._sock.close()  # type: ignore[union-attr]


def test_a_decoder_that_dies_or_hangs_is_an_image_refused() -> None:
    decoder = ForkedDecoder()
    decoder.fork()
    os.kill(decoder._pid, signal.SIGSTOP)
    assert decoder._sock is not None
    decoder._sock.settimeout(0.05)
    decoding = decoder.open()
    with pytest.raises(TimeoutError):
        decoding.run(PNG)
    decoding.stop()
    os.kill(decoder._pid, signal.SIGCONT)
    assert os.waitpid(decoder._pid, 0)[1] == signal.SIGKILL
    assert decoder.open().run(PNG) == b""
    decoder._sock.close()
