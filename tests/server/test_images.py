"""Images over HTTP: the clients of OpenAI and Anthropic, what is refused before it is decoded, and what a profile says."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from cloister.engine import EngineClient, ThreadTransport
from cloister.launch.engine import build_engine
from cloister.policy import Policy
from cloister.server import image_decoding, images
from cloister.server.image_child import DAMAGED, TOO_LARGE, UNKNOWN_FORMAT, Fault, decode
from cloister.server.images import ImageReader
from cloister.server.responses.keeping import ResponseStore
from cloister.text import Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from cloister.types.errors import InvalidRequestError
from tests.server.running_server import INFO, RunningServer, make_gate, serving
from tests.thinning import thin
from tests.vision_factory import NUM_TOKENS, encode_picture, make_picture, make_vision_model

PNG = encode_picture(make_picture(70, 40, 1))
OTHER = encode_picture(make_picture(30, 50, 2), "JPEG")


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data, kind)}}


def asks(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is that?"}]}]


async def start(path: Path) -> EngineClient:
    config = EngineConfig(
        model=str(path), backend="torch", dtype="float32", num_threads=1, max_model_len=400, kv_memory_mb=8, block_size=8,
        max_num_seqs=4, profile="open", speculate="none", prefix_cache=True, weights_cache="",
    )  # fmt: skip
    engine = EngineClient(ThreadTransport(build_engine(config)), config)
    await engine.start()
    return engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with serving(path, lambda: start(path), config=ServerConfig(port=0, drain_timeout_s=1.0, max_images=3)) as server:
        yield server


@pytest.fixture(scope="module")
def reader(path: Path) -> ImageReader:
    reader = ImageReader.open(path, Tokenizer(path), Policy("open"), 3)
    assert reader is not None
    return reader


def complete(server: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(
            model=server.engine.model.name, messages=messages, max_tokens=8, temperature=0, **fields
        )
        return list(reply) if "stream" in fields else reply


def test_the_prompt_is_that_of_transformers(reader: ImageReader, path: Path) -> None:
    tokenizer, pictures = Tokenizer(path), [make_picture(70, 40, 1), make_picture(48, 20, 2)]
    urls = [url_of(encode_picture(picture)) for picture in pictures]
    text = "<|endoftext|><|user|>look<image>and<image>what is that?<|end|>\n<|assistant|>"
    token_ids, tiles = reader.place(tokenizer.encode(text), asyncio.run(reader.load(urls)))
    found = SmolVLMImageProcessorPil.from_pretrained(path)([pictures], return_row_col_info=True, return_tensors="np")
    strings = [
        get_image_prompt_string(rows, cols, NUM_TOKENS, "<fake_token_around_image>", "<image>", "<global-img>")
        for rows, cols in zip(found["rows"][0], found["cols"][0], strict=True)
    ]
    expected = text
    for string in strings:
        expected = expected.replace("<image>", string.replace("<image>", "<placeholder>"), 1)
    assert token_ids == tokenizer.encode(expected.replace("<placeholder>", "<image>"))
    assert len(tiles) == 5 + 3
    placeholder = tokenizer.token_id("<image>")
    assert [i for i, token in enumerate(token_ids) if token == placeholder] == [
        i for tile in tiles for i in range(tile.offset, tile.end)
    ]


def test_the_openai_client_gets_an_answer_that_the_image_changes(server: RunningServer) -> None:
    seen = complete(server, asks(part(PNG)))
    again = complete(server, asks(part(PNG)))
    other = complete(server, asks(part(OTHER, "image/jpeg")))
    blind = complete(server, asks())
    assert seen.choices[0].message.content == again.choices[0].message.content
    assert len({answer.choices[0].message.content for answer in (seen, other, blind)}) == 3
    assert seen.usage.prompt_tokens >= blind.usage.prompt_tokens + 5 * NUM_TOKENS
    assert seen.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == (again.usage.prompt_tokens - 1) // 8 * 8
    two = complete(server, asks(part(PNG), part(OTHER)))
    assert two.usage.prompt_tokens > seen.usage.prompt_tokens + 3 * NUM_TOKENS
    chunks = complete(server, asks(part(PNG)), stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == seen.choices[0].message.content


def test_responses_and_messages_see_the_same(server: RunningServer) -> None:
    from anthropic import Anthropic  # takes a second, which every process that collects would pay

    expected = complete(server, asks(part(PNG)))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        content = [{"type": "input_image", "image_url": url_of(PNG)}, {"type": "input_text", "text": "what is that?"}]
        response = client.responses.create(
            model=server.engine.model.name, input=[{"role": "user", "content": content}], max_output_tokens=8, temperature=0
        )
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": "what is that?"}]
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        message = claude.messages.create(
            model=server.engine.model.name,
            messages=[{"role": "user", "content": blocks}],
            max_tokens=8,
            extra_body={"temperature": 0},
        )
        count = claude.messages.count_tokens(model=server.engine.model.name, messages=[{"role": "user", "content": blocks}])
    assert response.output_text == expected.choices[0].message.content == message.content[0].text
    assert count.input_tokens == response.usage.input_tokens == expected.usage.prompt_tokens


def test_a_user_cannot_write_a_placeholder(server: RunningServer) -> None:
    answer = complete(server, [{"role": "user", "content": "<image> <fake_token_around_image>"}])
    assert answer.usage.prompt_tokens > 20, "the spelling is text, letter by letter"
    complete(server, [{"role": "user", "content": [{"type": "text", "text": "<image>"}, part(PNG)]}])


def bomb(width: int, height: int) -> bytes:
    """A PNG of one byte that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def png_with(chunk: bytes) -> bytes:
    """A small PNG with a further chunk behind its header."""
    return PNG[:33] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + PNG[33:]


@pytest.fixture(scope="module")
def zeros() -> bytes:
    """What unpacks to 100 MB: half a second's work, which is not done in each process that collects tests."""
    return zlib.compress(bytes(100 << 20), 9)


@pytest.mark.parametrize("head", [b"zTXtk\0\0", b"iTXtk\0\1\0\0\0", b"iCCPk\0\0"], ids=["zTXt", "iTXt", "iCCP"])
def test_a_chunk_that_unpacks_to_much_is_refused(head: bytes, zeros: bytes) -> None:
    assert decode(png_with(b"zTXtk\0\0" + zlib.compress(b"short"))).size == (70, 40)
    with pytest.raises(Fault):
        decode(png_with(head + zeros))


BAD: dict[str, tuple[str, str]] = {
    "cut off": (url_of(PNG[:-300]), "cut off"),
    "header cut off": (url_of(PNG[:20]), "header is damaged"),
    "a bomb": (url_of(bomb(30_000, 30_000)), "million pixels"),
    "a bomb under Pillow's limit": (url_of(bomb(8_000, 8_000)), "million pixels"),
    "a bomb between Pillow's limits": (url_of(bomb(11_000, 11_000)), "million pixels"),
    "a line of 33 million pixels": (url_of(bomb(2**25, 1)), "65,535 on a side"),
    "a column of 65,536 pixels": (url_of(bomb(1, 2**16)), "65,535 on a side"),
    "another format": (url_of(encode_picture(make_picture(9, 9), "BMP")), "none of PNG"),
    "TIFF that says it is PNG": (url_of(encode_picture(make_picture(9, 9), "TIFF")), "none of PNG"),
    "text": (url_of(b"zanzibar" * 40), "none of PNG"),
    "nothing": (url_of(b""), "none of PNG"),
    "elsewhere": ("https://zanzibar.example/cat.png", "fetches no images"),
    "a file": ("file:///zanzibar", "fetches no images"),
    "no base64": ("data:image/png;base64,zanzibar*", "base64"),
    "not declared": ("data:text/html;base64,emFuemliYXI=", "not a data URL of an image"),
}


FAULTS = {
    "cut off": DAMAGED, "header is damaged": UNKNOWN_FORMAT, "none of PNG": UNKNOWN_FORMAT,
    "million pixels": TOO_LARGE, "65,535 on a side": TOO_LARGE,
}  # fmt: skip
"""By what the refusal says."""
DECODED = [name for name, (_, says) in BAD.items() if says in FAULTS]
ASKED_TOO = ("cut off", "a bomb", "a column of 65,536 pixels", "another format")
"""One of each refusal: a process of its own finds each out."""


@pytest.mark.parametrize("name", DECODED)
def test_a_bad_image_has_the_fault_that_its_refusal_names(name: str) -> None:
    url, says = BAD[name]
    with pytest.raises(Fault) as raised:
        decode(base64.b64decode(url.partition(",")[2]))
    assert raised.value.number == FAULTS[says]


@pytest.mark.parametrize("name", thin(BAD, [name for name in BAD if name not in DECODED or name in ASKED_TOO]))
def test_a_bad_image_is_refused_in_one_line(name: str, server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    url, says = BAD[name]
    with caplog.at_level(logging.DEBUG, "cloister"):
        reply = httpx.post(
            f"{server.url}/v1/chat/completions",
            json={"messages": asks(part(PNG), {"type": "image_url", "image_url": {"url": url}}), "max_tokens": 2},
            timeout=300,
        )
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "invalid_image", "messages")
    assert "Image 2 of `messages`" in error["message"]
    assert says in error["message"]
    assert "zanzibar" not in reply.text + caplog.text
    assert "\n" not in error["message"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_too_many_and_too_long_images_are_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(openai.BadRequestError, match="may have 3"):
        complete(server, asks(*[part(PNG)] * 4))
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(openai.BadRequestError, match="MiB"):
        complete(server, asks(part(PNG)))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("chat/completions", {"messages": [{"role": "assistant", "content": [part(PNG)]}, *asks()]}),
        ("chat/completions", {"messages": [{"role": "system", "content": [part(PNG)]}, *asks()]}),
        (
            "messages",
            {
                "max_tokens": 3,
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}],
                    }
                ],
            },
        ),
    ],
)
def test_only_a_user_shows_images(route: str, body: dict[str, Any], server: RunningServer) -> None:
    reply = httpx.post(f"{server.url}/v1/{route}", json=body)
    assert reply.status_code == 400
    assert "role user" in reply.json()["error"]["message"]


def test_a_prompt_whose_images_do_not_fit_is_refused(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "word " * 300}, *asks(part(PNG))]
    with pytest.raises(openai.BadRequestError, match="tokens"):
        complete(server, messages)


@pytest.mark.parametrize(("profile", "status", "says"), [("private", 400, "size class"), ("paranoid", 403, "image-inputs")])
def test_profiles_with_a_traffic_shape_refuse_images_that_nothing_covers(
    profile: str, status: int, says: str, path: Path
) -> None:
    with serving(path, lambda: start(path), gate=make_gate(profile)) as server:
        body = {"messages": asks(part(PNG)), "max_tokens": 2}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == status
    assert says in reply.json()["error"]["message"]


def test_a_text_model_says_that_it_reads_text_only(client: httpx.Client) -> None:
    reply = client.post("/v1/chat/completions", json={"model": INFO.name, "messages": asks(part(PNG))})
    assert reply.status_code == 400
    assert "reads text only" in reply.json()["error"]["message"]


def test_without_pillow_images_are_refused_and_text_is_answered(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "has_pillow", lambda: False)
    with pytest.raises(openai.BadRequestError, match=r"cloister\[vision\]"):
        complete(server, asks(part(PNG)))
    assert complete(server, asks()).usage.prompt_tokens


def opened(data: bytes) -> np.ndarray:
    return np.asarray(decode(data))


def decode_apart(data: bytes) -> Image.Image:
    return asyncio.run(image_decoding.decode_image(data, 1, lambda image: image))


def test_the_confined_process_says_the_same_of_a_file() -> None:
    for data in (
        PNG,
        OTHER,
        encode_picture(make_picture(31, 17, 4, "RGBA"), "WEBP"),
        encode_picture(make_picture(9, 5), "GIF"),
    ):
        assert np.array_equal(np.asarray(decode_apart(data)), opened(data))
    exif = Image.Exif()
    exif[0x0112] = 8
    turned = encode_picture(make_picture(31, 17), "JPEG", exif=exif)
    assert decode_apart(turned).size == (17, 31)


def test_a_process_that_dies_is_an_image_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoding.sys, "executable", "/bin/false")
    with pytest.raises(InvalidRequestError, match="too much time or memory"):
        decode_apart(PNG)


def wait_for(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def slow_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Has no image decoded for ten minutes; returns what lists the processes that were started for it."""
    script, log = tmp_path / "decoder", tmp_path / "pids"
    script.write_text(f"#!/bin/sh\necho $$ >> {log}\nexec sleep 600\n")
    script.chmod(0o755)
    monkeypatch.setattr(image_decoding.sys, "executable", str(script))
    monkeypatch.setattr(image_decoding, "DEADLINE_S", 600.0)
    return lambda: [int(pid) for pid in log.read_text().split()] if log.exists() else []


def test_a_process_that_hangs_is_an_image_refused(
    slow_decoder: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_decoding, "DEADLINE_S", 0.1)
    with pytest.raises(InvalidRequestError, match="too long"):
        decode_apart(PNG)
    assert not any(map(is_running, slow_decoder()))


def test_texts_are_answered_while_images_are_decoded_and_who_leaves_ends_that(
    server: RunningServer, slow_decoder: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = httpx.Request("POST", f"{server.url}/v1/chat/completions", json={"messages": asks(part(PNG)), "max_tokens": 2})
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with contextlib.ExitStack() as leaving:
        looking = []
        for _ in range(6):
            looking.append(leaving.enter_context(socket.create_connection((request.url.host, request.url.port or 0))))
            looking[-1].sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        wait_for(lambda: len(slow_decoder()) == images.SIDE_BY_SIDE)
        assert complete(server, asks()).usage.prompt_tokens
        assert select.select(looking, [], [], 0)[0] == [], "an image was answered first, or refused"
    wait_for(lambda: not any(map(is_running, slow_decoder())))
    assert len(slow_decoder()) <= 6
    monkeypatch.undo()
    assert complete(server, asks(part(PNG))).usage.prompt_tokens


def test_the_pixels_of_a_request_are_counted_while_it_is_read(reader: ImageReader, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [url_of(PNG)] * 3
    pixels = sum(len(tile) for image in asyncio.run(reader.load(urls)) for tile in image.tiles)
    monkeypatch.setattr(images, "MAX_REQUEST_PIXELS_BYTES", pixels)
    asyncio.run(reader.load(urls))
    monkeypatch.setattr(images, "MAX_REQUEST_PIXELS_BYTES", pixels - 1)
    with pytest.raises(InvalidRequestError, match="MiB of pixels"):
        asyncio.run(reader.load(urls))


def test_an_error_about_an_image_names_the_field_of_its_api(server: RunningServer) -> None:
    content = [{"type": "input_image", "image_url": url_of(b"x")}]
    reply = httpx.post(f"{server.url}/v1/responses", json={"input": [{"role": "user", "content": content}]}, timeout=300)
    assert reply.json()["error"]["param"] == "input"
    assert "`input`" in reply.json()["error"]["message"]


def test_files_become_what_people_see_of_them() -> None:
    picture = make_picture(31, 17, 4)
    assert np.array_equal(opened(encode_picture(picture)), np.asarray(picture))
    assert np.array_equal(opened(encode_picture(picture, "WEBP", lossless=True)), np.asarray(picture))
    clear = make_picture(31, 17, 4, "RGBA")
    white = Image.alpha_composite(Image.new("RGBA", clear.size, (255, 255, 255, 255)), clear).convert("RGB")
    assert np.array_equal(opened(encode_picture(clear)), np.asarray(white))
    frames = [Image.new("RGB", (8, 6), color) for color in ("red", "blue")]
    animated = encode_picture(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert (opened(animated) == (255, 0, 0)).all()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned
    assert opened(encode_picture(picture, "JPEG", exif=exif)).shape == (31, 17, 3)
    assert opened(encode_picture(make_picture(9, 5, 1, "L"))).shape == (5, 9, 3)


def test_random_damage_is_refused_or_read() -> None:
    rng = np.random.default_rng(0)
    num_refused = 0
    for form in ("PNG", "JPEG", "WEBP", "GIF"):
        data = encode_picture(make_picture(40, 30, 5), form)
        for _ in range(60):
            damaged = bytearray(data[: int(rng.integers(1, len(data) + 1))])
            for place in rng.integers(0, len(damaged), 4):
                damaged[place] = int(rng.integers(256))
            try:
                assert opened(bytes(damaged)).ndim == 3
            except Fault:
                num_refused += 1
    assert num_refused > 60


def test_a_template_without_a_place_for_images_is_told(reader: ImageReader) -> None:
    image = asyncio.run(reader.load([url_of(PNG)]))
    with pytest.raises(InvalidRequestError, match="no place"):
        reader.place([5, 6, 7], image)
    with pytest.raises(InvalidRequestError, match="no place"):
        reader.place([reader.token_id] * 2, image)


def test_ollamas_chat_takes_images_and_says_so(server: RunningServer) -> None:
    message = {"role": "user", "content": "what is that?", "images": [base64.b64encode(PNG).decode()]}
    body = {"messages": [message], "stream": False, "options": {"temperature": 0, "num_predict": 8}}
    reply = httpx.post(f"{server.url}/api/chat", json=body, timeout=300)
    expected = complete(server, asks(part(PNG)))
    assert reply.json()["message"]["content"] == expected.choices[0].message.content
    shown = httpx.post(f"{server.url}/api/show", json={"model": server.engine.model.name})
    assert "vision" in shown.json()["capabilities"]
    assert httpx.get(f"{server.url}/props").json()["modalities"] == {"vision": True, "audio": False}


def test_a_kept_response_goes_on_with_its_image(path: Path) -> None:
    content = [{"type": "input_image", "image_url": url_of(PNG)}, {"type": "input_text", "text": "what is that?"}]
    user = {"role": "user", "content": content}
    config = ServerConfig(port=0, drain_timeout_s=1.0)
    with (
        serving(path, lambda: start(path), config=config, responses_kept=ResponseStore()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        options = {"model": server.engine.model.name, "max_output_tokens": 4, "temperature": 0}
        first = client.responses.create(input=[user], **options)
        second = client.responses.create(input="sure?", previous_response_id=first.id, **options)
        answer = {"role": "assistant", "content": first.output_text}
        whole = client.responses.create(input=[user, answer, {"role": "user", "content": "sure?"}], **options)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens


def test_tokenize_sends_elsewhere_for_images(server: RunningServer) -> None:
    reply = httpx.post(f"{server.url}/tokenize", json={"messages": asks(part(PNG))})
    assert reply.status_code == 400
    assert "count_tokens" in reply.json()["error"]["message"]
    shown = httpx.post(f"{server.url}/apply-template", json={"messages": asks(part(PNG))})
    assert shown.json()["prompt"].count("<image>") == 5 * NUM_TOKENS
