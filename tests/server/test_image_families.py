"""Qwen and Gemma 3 with images, over HTTP: what stands in the prompt, what is counted, and what is refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cloister.engine import EngineClient, ThreadTransport
from cloister.launch.engine import build_engine
from cloister.policy import Policy
from cloister.server.conversation import ChatFormat
from cloister.server.images import ImageReader, ImagesPending
from cloister.server.schemas import ChatBody
from cloister.text import ChatTemplate, Tokenizer
from cloister.types.config import EngineConfig, ServerConfig
from tests.gemma_vision_factory import IMAGE_TOKEN as GEMMA_IMAGE_TOKEN
from tests.gemma_vision_factory import NUM_TOKENS, make_gemma_vision
from tests.qwen_vl_factory import ARCHITECTURES, IMAGE_TOKEN, make_qwen_vl
from tests.server.running_server import RunningServer, serving
from tests.thinning import thin
from tests.vision_factory import encode_picture, make_picture


def url_of(width: int, height: int, seed: int = 0) -> str:
    data = base64.b64encode(encode_picture(make_picture(width, height, seed))).decode()
    return f"data:image/png;base64,{data}"


@pytest.fixture(scope="module", params=thin(ARCHITECTURES, ("qwen2_5_vl", "qwen3_vl_moe")))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_vl(tmp_path_factory.mktemp("model"), request.param)


async def start(path: Path, **settings: Any) -> EngineClient:
    config = EngineConfig(
        model=str(path), num_threads=1, max_model_len=256, kv_memory_mb=8, block_size=8, max_num_seqs=4, profile="open",
        speculate="none", prefix_cache=True, weights_cache="", **(settings or {"backend": "torch", "dtype": "float32"}),
    )  # fmt: skip
    engine = EngineClient(ThreadTransport(build_engine(config)), config)
    await engine.start()
    return engine


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with serving(path, lambda: start(path), config=ServerConfig(port=0, drain_timeout_s=1.0, max_images=3)) as server:
        yield server


def complete(server: RunningServer, *content: dict[str, Any], **fields: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        return client.chat.completions.create(
            model=server.engine.model.name,
            messages=[{"role": "user", "content": list(content)}],  # type: ignore[misc,list-item]
            max_tokens=8,
            temperature=0,
            **fields,
        )


def image(width: int, height: int, seed: int = 0) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(width, height, seed)}}


TEXT = {"type": "text", "text": "what is that?"}


def test_the_prompt_is_that_of_transformers(path: Path) -> None:
    reader = ImageReader.open(path, Tokenizer(path), Policy("open"), 3)
    assert reader is not None
    sizes = [(70, 40), (30, 90)]
    text = "<|endoftext|>a<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|image_pad|><|vision_end|>c<|end|>"
    found, tiles = reader.place(Tokenizer(path).encode(text), asyncio.run(reader.load([url_of(*size) for size in sizes])))
    processor = Qwen2VLImageProcessorPil.from_pretrained(path)
    theirs = SimpleNamespace(
        image_processor=processor, image_token="<|placeholder|>"
    )  # the whole needs torchvision, for videos
    inputs = processor([make_picture(*size) for size in sizes], return_tensors="np")
    for number in range(2):
        text = text.replace("<|image_pad|>", Qwen2_5_VLProcessor.replace_image_token(theirs, inputs, number), 1)
    assert found == Tokenizer(path).encode(text.replace("<|placeholder|>", "<|image_pad|>"))
    assert [place for place, token in enumerate(found) if token == IMAGE_TOKEN] == [
        place for tile in tiles for place in range(tile.offset, tile.end)
    ]
    assert [[1, *(2 * side for side in tile.grid or ())] for tile in tiles] == inputs["image_grid_thw"].tolist()


def test_usage_counts_the_tokens_of_each_image(server: RunningServer) -> None:
    one = complete(server, image(48, 48), TEXT).usage.prompt_tokens
    two = complete(server, image(48, 48), image(48, 36), TEXT).usage.prompt_tokens
    assert two - one == 4 * 3 + 2
    assert complete(server, image(48, 48), TEXT).usage.prompt_tokens == one


def test_an_image_changes_the_answer(server: RunningServer) -> None:
    answers = {complete(server, image(60, 40, seed), TEXT).choices[0].message.content for seed in (1, 2, 3)}
    assert len(answers) > 1


def test_a_very_thin_image_is_refused(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="Image 2 of `messages` has sides of a ratio of more than 200"):
        complete(server, image(48, 48), image(201, 1), TEXT)
    assert complete(server, image(200, 1), TEXT).usage.completion_tokens


FORMS = [{"dtype": "float32"}, {"quant": "int8"}, {"quant": "int4"}]


def check_native(path: Path, torch_server: RunningServer, settings: dict[str, Any]) -> None:
    """The native kernels serve a model where nothing else is chosen: in float32 with the answers of torch."""
    asked = [[image(60, 40, 1), TEXT, image(30, 30, 1)], [image(60, 40, 2), TEXT]]
    with serving(
        path, lambda: start(path, **settings), config=ServerConfig(port=0, drain_timeout_s=1.0, max_images=3)
    ) as native:
        assert native.engine.model.backend == "native"
        found = [complete(native, *parts) for parts in (*asked, asked[0])]
    assert found[0].choices == found[2].choices
    assert found[2].usage.prompt_tokens_details.cached_tokens >= found[0].usage.prompt_tokens - 8
    answers = [reply.choices[0].message.content for reply in found[:2]]
    if "quant" in settings:
        assert len(set(answers)) > 1
    else:
        assert answers == [complete(torch_server, *parts).choices[0].message.content for parts in asked]


EACH_WITH_A_FORM = thin(product(ARCHITECTURES, FORMS), [("qwen2_5_vl", FORMS[0]), ("qwen3_vl", FORMS[1])])
"""Each form is quick with one model, int4 with Gemma's below; all of them on these kernels `tests/models` compares."""


@pytest.mark.parametrize(("path", "settings"), EACH_WITH_A_FORM, ids=str, indirect=["path"])
def test_the_native_kernels_serve_qwen(settings: dict[str, Any], path: Path, server: RunningServer) -> None:
    check_native(path, server, settings)


# Gemma 3


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma_vision(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def gemma_server(gemma: Path) -> Iterator[RunningServer]:
    with serving(gemma, lambda: start(gemma), config=ServerConfig(port=0, drain_timeout_s=1.0, max_images=3)) as server:
        yield server


def test_the_prompt_of_gemma_is_that_of_transformers(gemma: Path) -> None:
    """The processor writes empty lines around an image before the text is tokenized, so newlines beside it join them."""
    tokenizer = Tokenizer(gemma)
    reader = ImageReader.open(gemma, tokenizer, Policy("open"), 3)
    assert reader is not None
    conversation = ChatFormat.of(tokenizer, ChatTemplate.load(gemma, tokenizer.special), ServerConfig(), reader)
    parts = [image(48, 48), {"type": "text", "text": "\na <start_of_image>?"}, image(30, 90, 1)]
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})
    with pytest.raises(ImagesPending) as pending:
        conversation.open(body)
    with ImagesPending.loaded(asyncio.run(pending.value.load("ann"))):
        opened = conversation.open(body)
    whole = f"\n\n<start_of_image>{'<image_soft_token>' * NUM_TOKENS}<end_of_image>\n\n"
    asked = "a <|placeholder|>?"
    text = f"<|endoftext|><|user|>\n{whole}\n{asked}{whole}<|end|>\n<|assistant|>\n"
    before, after = (tokenizer.encode(part) for part in text.split("<|placeholder|>"))
    assert opened.token_ids == [*before, *tokenizer.encode("<start_of_image>", parse_special=False), *after]
    places = [place for place, token in enumerate(opened.token_ids) if token == GEMMA_IMAGE_TOKEN]
    assert places == [place for tile in opened.images for place in range(tile.offset, tile.end)]
    assert all(tile.bidirectional for tile in opened.images)


def test_gemma_answers_and_counts(gemma_server: RunningServer) -> None:
    one = complete(gemma_server, image(48, 48), TEXT).usage
    two = complete(gemma_server, image(48, 48), image(90, 20), TEXT).usage
    assert two.prompt_tokens - one.prompt_tokens >= NUM_TOKENS + 2
    answers = {complete(gemma_server, image(60, 40, seed), TEXT).choices[0].message.content for seed in (1, 2, 3, 4)}
    assert len(answers) > 1


@pytest.mark.parametrize("settings", thin(FORMS, FORMS[2:]), ids=str)
def test_the_native_kernels_serve_gemma(settings: dict[str, Any], gemma: Path, gemma_server: RunningServer) -> None:
    check_native(gemma, gemma_server, settings)
