"""Images of different sizes, whose tokens turn by row and column: the same bits in any chunks, company, hit and draft."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloister.executor.images import GridPositions
from cloister.models.image_processing import open_image_processor
from cloister.types.images import ImageTile
from tests.qwen_vl_factory import ARCHITECTURES, make_qwen_vl
from tests.thinning import thin
from tests.vision_factory import make_picture
from tests.vision_serving import ON_NATIVE_KERNELS, Served, make_request, place_tiles, score, serve_one

PLACES = [2, 11, 12, 30]
SIZES = [(70, 40), (24, 60), (30, 30), (100, 20)]
Prompt = tuple[list[int], tuple[ImageTile, ...]]
Make = Callable[..., Served]


@pytest.fixture(scope="module", params=thin(ARCHITECTURES, ["qwen2_5_vl"]))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen_vl(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module", params=["torch", "native"])
def make(path: Path, request: pytest.FixtureRequest) -> Make:
    """Makes a scheduler and a runner on each back end."""
    return partial(Served, path, backend=request.param)


def prompt_of(path: Path, seeds: tuple[int, ...] = (1, 2, 3, 4), length: int = 40) -> Prompt:
    opened = open_image_processor(path)
    assert opened is not None
    processor = opened[0]
    pictures = [make_picture(*size, seed) for size, seed in zip(SIZES, seeds, strict=True)]
    grids = [processor.token_grid(processor.grid(*picture.size)) for picture in pictures]
    pixels = [processor.cut(picture)[0] for picture in pictures]
    return place_tiles([5 + 7 * i % 200 for i in range(length)], pixels, PLACES, grids=grids)


@pytest.fixture(scope="module")
def expected(path: Path, make: Make) -> list[int]:
    return serve_one(make(), *prompt_of(path))


@pytest.mark.parametrize("chunk", thin([3, 200, 1, 7], 2))
def test_chunks_that_cut_an_image_change_no_token(chunk: int, path: Path, make: Make, expected: list[int]) -> None:
    assert serve_one(make(chunk=chunk, block_size=4, num_threads=2), *prompt_of(path)) == expected


def test_logprobs_have_the_same_bits_in_any_chunks(path: Path, make: Make) -> None:
    prompt, images = prompt_of(path)
    found = score(make(chunk=3), prompt, images)
    assert len(found) == len(prompt) - 1
    assert found == score(make(chunk=64, num_threads=2), prompt, images)


def test_company_forks_and_preemption_change_no_token(path: Path, make: Make, expected: list[int]) -> None:
    requests = [make_request("a", *prompt_of(path)), make_request("b", *prompt_of(path, (5, 6, 7, 8)))]
    requests += [make_request("c", [7] * 50, ()), make_request("d", *prompt_of(path), n=3, temperature=1.0)]
    alone = {request.request_id: make().serve([request]) for request in requests}
    crowded = make(chunk=9, num_blocks=24, images_at_once=1)
    found = crowded.serve(requests)
    assert crowded.num_preempted
    assert found == {name: tokens for one in alone.values() for name, tokens in one.items()}
    assert found["a", 0] == expected


@ON_NATIVE_KERNELS
def test_drafts_change_no_token(path: Path, make: Make) -> None:
    prompt, images = prompt_of(path)
    plain = serve_one(make(), prompt, images, max_tokens=30)
    drafting = make(answers=[[*prompt, *plain]])
    assert serve_one(drafting, prompt, images, max_tokens=30) == plain
    assert drafting.speculation is not None
    assert drafting.speculation.num_accepted > 5


@ON_NATIVE_KERNELS
def test_the_same_images_are_a_prefix_hit_and_another_one_is_none(path: Path, make: Make, expected: list[int]) -> None:
    served = make(block_size=4)
    prompt, images = prompt_of(path)
    assert serve_one(served, prompt, images) == expected
    assert serve_one(served, prompt, images) == expected
    assert served.num_hit == (len(prompt) - 1) // 4 * 4
    served.num_hit = 0
    other, different = prompt_of(path, (1, 2, 3, 9))
    assert other == prompt
    assert serve_one(served, prompt, different) == serve_one(make(), prompt, different) != expected
    assert served.num_hit == images[3].offset // 4 * 4


@ON_NATIVE_KERNELS
def test_a_second_turn_finds_the_images_of_the_first(path: Path, make: Make, expected: list[int]) -> None:
    served = make(block_size=4)
    prompt, images = prompt_of(path)
    answer = serve_one(served, prompt, images)
    more, others = prompt_of(path, (9, 8, 7, 6))
    shift = len(prompt) + len(answer)
    turn = [*prompt, *answer, *more]
    both = (*images, *(msgspec.structs.replace(image, offset=image.offset + shift) for image in others))
    assert serve_one(served, turn, both) == serve_one(make(), turn, both)
    assert served.num_hit >= len(prompt) // 4 * 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"grid": None}, "positions"),
        ({"grid": (1, 2)}, "positions"),
        ({"grid": (-1, -18)}, "positions"),
        ({"pixels": b"123"}, "size"),
    ],
)
def test_an_image_that_does_not_fit_fails_its_request_alone(
    change: dict[str, object], word: str, path: Path, make: Make, expected: list[int]
) -> None:
    prompt, images = prompt_of(path)
    served = make()
    bad = make_request("bad", prompt, (msgspec.structs.replace(images[0], **change),))
    found = served.serve([bad, make_request("good", prompt, images)])
    assert found["bad", 0] == []
    assert found["good", 0] == expected
    assert len(served.failures) == 1
    assert word in served.failures[0]


def test_positions_are_those_of_the_paper() -> None:
    """Figure 3 of arXiv:2409.12191: what follows an image goes on from the greatest of its three numbers."""
    tiles = [ImageTile(offset=2, num_tokens=6, digest=b"", pixels=b"", grid=(2, 3))]
    tiles.append(ImageTile(offset=9, num_tokens=2, digest=b"", pixels=b"", grid=(2, 1)))
    grids = GridPositions.of(tiles)
    assert grids is not None
    turns = grids.turn(np.arange(13, dtype=np.int32))
    assert turns[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9]
    assert turns[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9]
    assert turns[2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 6, 8, 9]
    assert grids.turn(np.array([11, 4], np.int32))[2].tolist() == [8, 4]
    assert GridPositions.of([msgspec.structs.replace(tiles[0], grid=None)]) is None
