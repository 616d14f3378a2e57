"""Pictures in prompts: the same bits however a prompt is cut and whatever else runs; nobody is given another's picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from cloister.backends.base import ForwardBatch, StepOutput, Wants
from cloister.executor.images import SequenceImages
from cloister.kv import PrefixKeys
from cloister.models import load
from cloister.models.image_processing import open_image_processor
from cloister.types.images import ImageTile
from cloister.types.scope import Scope, ScopeKind
from tests.thinning import thin
from tests.vision_factory import NUM_TOKENS, make_picture, make_vision_model
from tests.vision_serving import ON_NATIVE_KERNELS, Served, make_request, place_tiles, serve_one

PLACES = [2, 3, 11, 12, 30]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tiles(path: Path) -> list[bytes]:
    opened = open_image_processor(path)
    assert opened is not None
    return [tile for seed in (1, 2) for tile in opened[0].cut(make_picture(48, 48, seed))]


def prompt_of(tiles: list[bytes], length: int = 40) -> tuple[list[int], tuple[ImageTile, ...]]:
    return place_tiles([5 + 7 * i % 200 for i in range(length)], tiles[:5], PLACES, NUM_TOKENS)


Make = Callable[..., Served]


@pytest.fixture(scope="module", params=["torch", "native"])
def make(path: Path, request: pytest.FixtureRequest) -> Make:
    """Makes a scheduler and a runner on each back end."""
    return partial(Served, path, backend=request.param)


@pytest.fixture(scope="module")
def expected(make: Make, tiles: list[bytes]) -> list[int]:
    return serve_one(make(), *prompt_of(tiles))


@pytest.mark.parametrize("chunk", thin([1, 2, 3, 5, 7, 200], [3, 200]))
def test_chunks_that_cut_an_image_change_no_token(chunk: int, make: Make, tiles: list[bytes], expected: list[int]) -> None:
    served = make(chunk=chunk, block_size=4, num_threads=2)
    assert serve_one(served, *prompt_of(tiles)) == expected


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_images_are_encoded_at_once_and_each_once(most: int, make: Make, tiles: list[bytes], expected: list[int]) -> None:
    served = make(images_at_once=most)
    found = served.serve([make_request("a", *prompt_of(tiles)), make_request("b", *prompt_of(tiles[5:]))])
    assert found["a", 0] == expected
    assert max(served.encoded) <= most
    assert len(served.encoded) == 10


def test_logprobs_have_the_same_bits_in_any_chunks(make: Make, tiles: list[bytes]) -> None:
    prompt, images = prompt_of(tiles)
    seen = []
    for chunk in (3, 64):
        served, found = make(chunk=chunk), []
        request = make_request("a", prompt, images)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=2))
        served.scheduler.add(request, 0.0)
        while (plan := served.plan()) is not None:
            result = served.runner.run(plan)
            found += [entry.top for entries in result.prompt_logprobs.values() for entry in entries]
            served.scheduler.commit(result, {}, 0.0)
        seen.append(found)
    assert len(seen[0]) == len(prompt) - 1
    assert seen[0] == seen[1]


def test_another_image_gives_another_answer(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    assert serve_one(make(), *prompt_of(tiles[5:])) != expected
    prompt, _ = prompt_of(tiles)
    assert serve_one(make(), prompt, ()) != expected


def test_company_forks_and_preemption_change_no_token(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    requests = [make_request("a", *prompt_of(tiles)), make_request("b", *prompt_of(tiles[5:])), make_request("c", [7] * 50, ())]
    requests += [make_request("d", *prompt_of(tiles), n=3, temperature=1.0)]
    alone = {request.request_id: make().serve([request]) for request in requests}
    crowded = make(chunk=9, num_blocks=26, images_at_once=1)
    found = crowded.serve(requests)
    assert crowded.num_preempted
    assert found == {name: tokens for one in alone.values() for name, tokens in one.items()}
    assert found["a", 0] == expected


@ON_NATIVE_KERNELS
def test_no_copy_of_embeddings_outlives_its_step(make: Make, tiles: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    served, given = make(chunk=9), []
    step = served.program.step

    def watch(batch: ForwardBatch, wants: Wants) -> StepOutput:
        if batch.embeddings is not None:
            assert batch.embeddings.any()
            given.append(batch.embeddings)
        return step(batch, wants)

    monkeypatch.setattr(served.program, "step", watch)
    prompt, images = prompt_of(tiles)
    served.serve([make_request("a", prompt, images), make_request("b", prompt, images, temperature=1.0)])
    assert len(given) > 2
    assert not any(embeddings.any() for embeddings in given)


@ON_NATIVE_KERNELS
def test_the_same_image_is_a_prefix_hit_and_another_one_is_none(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    served = make(block_size=4)
    prompt, images = prompt_of(tiles)
    assert serve_one(served, prompt, images) == expected
    assert served.num_hit == 0
    assert serve_one(served, prompt, images) == expected
    assert served.num_hit == (len(prompt) - 1) // 4 * 4
    served.num_hit = 0
    other, different = prompt_of([tiles[5], *tiles[1:5]])
    assert other == prompt
    assert serve_one(served, prompt, different) == serve_one(make(), prompt, different) != expected
    assert served.num_hit == 0, "the first image stands in the first block"
    last = prompt_of([*tiles[:4], tiles[5]])[1]
    assert serve_one(served, prompt, last) == serve_one(make(), prompt, last)
    assert served.num_hit == images[4].offset // 4 * 4
    served.num_hit = 0
    serve_one(served, prompt, ())
    assert served.num_hit == 0, "placeholders without an image are others"


def test_a_hit_that_ends_inside_an_image_changes_no_token(make: Make, tiles: list[bytes], expected: list[int]) -> None:
    prompt, images = prompt_of(tiles)
    served = make(block_size=3)
    cut = images[3].offset + 2
    beginning = [image for image in images if image.end <= cut]
    broken = ImageTile(offset=images[3].offset, num_tokens=NUM_TOKENS, digest=images[3].digest, pixels=images[3].pixels)
    served.serve([make_request("first", prompt[: images[3].end], (*beginning, broken), max_tokens=1)])
    assert serve_one(served, prompt, images) == expected
    assert served.num_hit


@ON_NATIVE_KERNELS
def test_another_scope_finds_no_image(make: Make, tiles: list[bytes]) -> None:
    served = make()
    prompt, images = prompt_of(tiles)
    for name in ("first", "second"):
        served.serve([make_request(name, prompt, images, scope=Scope(ScopeKind.TENANT, name.encode()))])
    assert served.num_hit == 0


def test_keys_name_place_length_and_digest_of_every_image() -> None:
    keys = PrefixKeys("model", 4, public=[[9] * 8])
    root = keys.root(Scope(ScopeKind.TENANT, b"a"))

    def chain(*images: ImageTile) -> list[bytes]:
        found: list[bytes] = []
        keys.extend(found, root, [9] * 12, 3, images=images)
        return found

    def tile(offset: int, num_tokens: int, digest: bytes) -> ImageTile:
        return ImageTile(offset=offset, num_tokens=num_tokens, digest=digest * 32, pixels=b"")

    plain = chain()
    assert plain[:2] == sorted(keys.public, key=plain.index)
    found = [chain(tile(5, 2, b"a")), chain(tile(5, 2, b"b")), chain(tile(5, 3, b"a")), chain(tile(6, 2, b"a"))]
    assert all(other[0] == plain[0] for other in found)
    assert len({other[1] for other in found} | {plain[1]}) == 5
    assert len({other[2] for other in found} | {plain[2]}) == 5
    across = chain(tile(3, 6, b"a"))
    assert not set(across) & set(plain)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"offset": 39}, "positions"),
        ({"num_tokens": 5}, "positions"),
        ({"pixels": b"123"}, "size"),
    ],
)
def test_an_image_that_does_not_fit_fails_its_request_alone(
    change: dict[str, object], word: str, make: Make, tiles: list[bytes], expected: list[int]
) -> None:
    prompt, images = place_tiles(list(range(5, 41)), tiles[:1], [3], NUM_TOKENS)
    served = make()
    bad = make_request("bad", prompt, (msgspec.structs.replace(images[0], **change),))
    found = served.serve([bad, make_request("good", *prompt_of(tiles))])
    assert found["bad", 0] == []
    assert found["good", 0] == expected
    assert len(served.failures) == 1
    assert word in served.failures[0]


def test_embeddings_are_overwritten_when_a_step_is_past_them(tiles: list[bytes]) -> None:
    _, images = prompt_of(tiles)
    kept = np.ones((NUM_TOKENS, 8), np.float32)
    found = SequenceImages(list(images), {images[0].offset: kept, images[1].offset: kept + 1})
    assert [position for position, _ in found.rows(images[0].offset + 1, images[1].offset + 2)] == [3, 7]
    found.drop_before(images[0].end)
    assert not kept.any()
    assert found.tiles == list(images[1:])


def test_nothing_of_an_image_is_shown(tiles: list[bytes]) -> None:
    _, images = prompt_of(tiles)
    assert repr(images[0]) == "ImageTile(num_tokens=4)"


def test_a_text_model_encodes_no_images(make: Make, path: Path) -> None:
    assert load(path).spec.vision is not None
    request = make_request("a", [5] * 20, (ImageTile(offset=2, num_tokens=4, digest=b"", pixels=b""),))
    served = make()
    served.runner._batch._vision = None
    assert served.serve([request]) == {("a", 0): []}
    assert served.failures == ["this engine encodes no images; send text only"]
