"""Images whose positions see each other: no chunk ends inside one, and the bits are the same in any chunks and company."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloister.executor.images import SequenceImages, find_last_seen
from cloister.models.image_processing import open_image_processor
from cloister.types.errors import EngineError
from cloister.types.events import Ended
from cloister.types.images import ImageTile
from tests.gemma_vision_factory import NUM_TOKENS, make_gemma_vision
from tests.thinning import thin
from tests.vision_factory import make_picture
from tests.vision_serving import ON_NATIVE_KERNELS, Served, make_request, place_tiles, score, serve_one

PLACES = [2, 3, 11, 12, 30]
Prompt = tuple[list[int], tuple[ImageTile, ...]]
Make = Callable[..., Served]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma_vision(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=["torch", "native"])
def make(path: Path, request: pytest.FixtureRequest) -> Make:
    """Makes a scheduler and a runner on each back end."""
    return partial(Served, path, backend=request.param)


@pytest.fixture(scope="module")
def tiles(path: Path) -> list[bytes]:
    opened = open_image_processor(path)
    assert opened is not None
    return [opened[0].cut(make_picture(40, 30, seed))[0] for seed in range(10)]


def prompt_of(tiles: list[bytes], length: int = 40) -> Prompt:
    tokens = [5 + 7 * i % 200 for i in range(length)]
    return place_tiles(tokens, tiles[:5], PLACES, NUM_TOKENS, bidirectional=True)


@pytest.fixture(scope="module")
def expected(make: Make, tiles: list[bytes]) -> list[int]:
    return serve_one(make(), *prompt_of(tiles))


@pytest.mark.parametrize("chunk", thin([14, 15, 17, 23, 200], [15, 200]))
def test_chunks_change_no_bit(chunk: int, make: Make, tiles: list[bytes], expected: list[int]) -> None:
    served = make(chunk=chunk, block_size=4, num_threads=2)
    assert serve_one(served, *prompt_of(tiles)) == expected
    assert score(make(chunk=chunk), *prompt_of(tiles)) == score(make(), *prompt_of(tiles))


def test_an_image_sees_itself_whole(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    prompt, images = prompt_of(tiles)
    causal = tuple(msgspec.structs.replace(image, bidirectional=False) for image in images)
    served = make()
    assert served.serve([make_request("a", prompt, causal)]) == {("a", 0): []}
    assert "positions" in served.failures[0]


@ON_NATIVE_KERNELS
def test_a_step_without_time_takes_an_image_whole(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    served = make(target_s=1e-6)
    serve_one(served, [7] * 30, ())  # from here on it knows that a step of 8 tokens takes longer
    served.scheduler.add(make_request("a", *prompt_of(tiles)), 1.0)
    plan = served.scheduler.plan(1.0)
    assert plan is not None
    assert plan.num_tokens < NUM_TOKENS
    served = make(target_s=1e-6)
    serve_one(served, [7] * 30, ())
    assert serve_one(served, *prompt_of(tiles)) == expected


def test_company_forks_and_preemption_change_no_token(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    prompts = {"a": prompt_of(tiles), "b": prompt_of(tiles[5:]), "c": ([7] * 50, ())}
    requests = [make_request(name, *prompt, max_tokens=30) for name, prompt in prompts.items()]
    requests.append(make_request("d", *prompt_of(tiles), max_tokens=30, n=3, temperature=1.0))
    alone = {request.request_id: make().serve([request]) for request in requests}
    crowded = make(chunk=16, num_blocks=28, images_at_once=1)
    found = crowded.serve(requests)
    assert crowded.num_preempted
    assert found == {name: tokens for one in alone.values() for name, tokens in one.items()}
    assert found["a", 0][:12] == expected


@ON_NATIVE_KERNELS
def test_drafts_change_no_token(make: Make, tiles: list[bytes]) -> None:
    prompt, images = prompt_of(tiles)
    plain = serve_one(make(), prompt, images, max_tokens=30)
    drafting = make(answers=[[*prompt, *plain]])
    others = make_request("b", *prompt_of(tiles[5:]))
    found = drafting.serve([make_request("a", prompt, images, max_tokens=30), others])
    assert found["a", 0] == plain
    assert found["b", 0] == make().serve([others])["b", 0]
    assert drafting.speculation is not None
    assert drafting.speculation.num_accepted > 5


@ON_NATIVE_KERNELS
@pytest.mark.parametrize("block_size", [3, 4])
def test_a_hit_that_ends_inside_an_image_changes_no_token(
    block_size: int, make: Make, tiles: list[bytes], expected: list[int]
) -> None:
    served = make(block_size=block_size)
    prompt, images = prompt_of(tiles)
    other, different = prompt_of([*tiles[:4], tiles[7]])
    assert serve_one(served, other, different) != expected
    assert serve_one(served, prompt, images) == expected
    assert served.num_hit == images[4].offset // block_size * block_size
    served.num_hit = 0
    ends = images[4].offset + NUM_TOKENS - 1
    assert serve_one(served, prompt[: images[4].end], images) == serve_one(make(), prompt[: images[4].end], images)
    assert served.num_hit == ends // block_size * block_size > images[4].offset


def test_an_image_that_no_step_can_take_is_refused(make: Make, tiles: list[bytes]) -> None:
    served = make(chunk=13)
    served.scheduler.add(make_request("a", *prompt_of(tiles)), 0.0)
    (ended,) = [event for event in served.scheduler.take_events() if isinstance(event, Ended)]
    assert ended.error is not None
    assert "--max-batched-tokens to 14" in ended.error
    assert serve_one(make(chunk=9, num_seqs=1), *prompt_of(tiles))


def test_a_plan_that_ends_inside_an_image_is_an_error() -> None:
    image = ImageTile(offset=4, num_tokens=3, digest=b"", pixels=b"", bidirectional=True)
    positions = np.array([9, 3, 4, 5, 6, 7], np.int32)
    seen = find_last_seen([(SequenceImages([image]), 3, 8, 1)], positions)
    assert seen is not None
    assert seen.tolist() == [9, 3, 6, 6, 6, 7]
    seen = find_last_seen([(SequenceImages([image]), 6, 8, 4)], positions)
    assert seen is not None
    assert seen.tolist() == [9, 3, 4, 5, 6, 7]
    assert find_last_seen([(SequenceImages([image]), 7, 8, 0)], positions) is None
    with pytest.raises(EngineError, match="ends inside an image"):
        find_last_seen([(SequenceImages([image]), 3, 6, 0)], positions)
