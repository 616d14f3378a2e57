"""Images in a decoder: tokens that turn by time, row and column, rows added behind the first layers, positions that see later
ones. Both back ends agree, and no company, chunk, tree, number format or instruction set changes a bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import GREEDY, HIDDEN, KV_ONLY, LOGITS, FloatArray, ForwardBatch, IntArray, Weights
from cloister.backends.spec import DecoderSpec, LayerSpec, RopeSpec
from cloister.executor.images import GridPositions
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build
from tests.native import KERNELS, LATENT, MIXTURE, NARROW, WINDOWED, build_native, changed, in_turns
from tests.thinning import cover
from tests.token_trees import KV_FORMS, path_to, plan_trees, run_path

GRIDS = {(5, 29): 4, (29, 41): 12, (60, 61): 1, (70, 140): 7, (250, 270): 2}
"""Columns of images in rows and columns, by their positions. They may be cut."""
WHOLE = ((7, 14), (14, 21), (28, 35), (56, 63), (252, 259))
"""Images that no arrangement cuts: those are in chunks of 7, 50 and 100, and halves of 300."""
LONG = ((3, 160), (161, 168), (200, 530))


def by_axes(spec: DecoderSpec, axes: Sequence[int]) -> DecoderSpec:
    """Gives the rotation of every layer axes, again and again."""
    rope = spec.layers[0].grouped_attention.rope
    assert rope is not None
    return changed(spec, attention={"rope": replace(rope, axes=tuple(np.resize(axes, len(rope.inv_freq)).tolist()))})


ONE_WINDOW = replace(WINDOWED, layers=(WINDOWED.layers[0], changed(WINDOWED, attention={"window": None}).layers[0]))
OF_LATENTS = replace(LATENT, rope=RopeSpec((1.0, 0.3, 0.01), axes=(0, 1, 2)))


@dataclass(frozen=True)
class Case:
    """A decoder and its images: in rows and columns, with `num_added` rows behind its first layers, or seen whole."""

    spec: DecoderSpec
    num_added: int = 0
    whole: tuple[tuple[int, int], ...] = ()


CASES = {
    "sections one after another": Case(by_axes(NARROW, [0] * 4 + [1] * 6 + [2] * 6)),
    "sections in turns, added rows": Case(by_axes(NARROW, [0, 1, 2]), num_added=2),
    "a window, norms of heads, added rows behind one layer": Case(by_axes(WINDOWED, [2, 0, 0, 1]), num_added=1),
    "experts, added rows": Case(changed(by_axes(NARROW, [0, 2, 1, 1]), layer={"mlp": MIXTURE}), num_added=2),
    "latent attention": Case(replace(NARROW, layers=(LayerSpec(OF_LATENTS, NARROW.layers[0].mlp),) * 2)),
    "images seen whole": Case(NARROW, whole=WHOLE),
    "images seen whole, a window": Case(WINDOWED, whole=WHOLE),
    "images seen whole, a window in one layer": Case(ONE_WINDOW, whole=WHOLE),
}


class ImageDriver(Driver):
    """Puts the images of a case at their positions in every sequence; one that ends behind a step is text there."""

    def __init__(self, driver: Driver, case: Case) -> None:
        self.__dict__ = driver.__dict__
        self._case = case
        count = (1 + case.num_added) * case.spec.hidden_size
        self._rows = np.random.default_rng(4).standard_normal((600, count), dtype=np.float32)

    def plan(self, parts: Mapping[Any, Sequence[int]], logit_rows: Sequence[int] | None = None) -> ForwardBatch:
        return self.place_images(super().plan(parts, logit_rows))

    def place_images(self, batch: ForwardBatch) -> ForwardBatch:
        spans = self._case.whole or tuple(GRIDS)
        if self._case.whole:
            batch = replace(batch, last_seen=see_whole(batch, spans))
        else:
            sizes = [(end - start, columns) for (start, end), columns in GRIDS.items()]
            saved = [size - max(columns, size // columns) for size, columns in sizes]
            grids = GridPositions(tuple((*span, GRIDS[span], less) for span, less in zip(spans, saved, strict=True)))
            batch = replace(batch, rope_positions=grids.turn(batch.positions))
        places = np.flatnonzero([any(start <= at < end for start, end in spans) for at in batch.positions]).astype(np.int32)
        return replace(batch, embeddings=self._rows[batch.positions[places]], embedding_rows=places)


def see_whole(batch: ForwardBatch, spans: Sequence[tuple[int, int]]) -> IntArray:
    """Returns `ForwardBatch.last_seen`, of images that the step of a sequence computes to their ends."""
    seen = batch.positions.copy()
    for first, end, context in zip(batch.query_starts, batch.query_starts[1:], batch.context_lens, strict=False):
        for start, stop in spans:
            inside = (batch.positions[first:end] >= start) & (batch.positions[first:end] < stop)
            if stop <= context:
                seen[first:end][inside] = stop - 1
    return seen


def tokens_of(count: int = 301, seed: int = 5) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 320, count).tolist()
    return tokens


def quantized(spec: DecoderSpec, quant: str) -> Weights:
    weights = RandomWeights(spec)
    return weights if quant == "none" else QuantizedWeights(weights, FORMATS.get(quant)(FormatOptions()))


@pytest.mark.parametrize(("name", "kernels"), in_turns(CASES))
def test_the_kernels_compute_what_the_reference_does(name: str, kernels: str) -> None:
    case = CASES[name]
    weights, tokens = RandomWeights(case.spec), tokens_of()
    found = ImageDriver(build_native(case.spec, weights, kernels=kernels), case).run("a", tokens)
    expected = ImageDriver(build(case.spec, weights), case).run("a", tokens)
    assert np.abs(found - expected).max() < 3e-4
    if name != "latent attention":  # what other axes, and images that do not see themselves, would give
        other = replace(case, whole=((400, 401),)) if case.whole else replace(case, spec=by_axes(case.spec, [0]))
        missed = ImageDriver(build_native(other.spec, weights, kernels=kernels), other).run("a", tokens)
        assert np.abs(missed[10:30] - found[10:30]).max() > 0.01


@pytest.mark.parametrize(
    ("name", "quant"), cover([name for name in CASES if "experts" not in name and "latent" not in name], ["int8", "int4"])
)
def test_weights_of_few_bits_compute_what_the_reference_does_with_the_same_codes(name: str, quant: str) -> None:
    case = CASES[name]
    weights, tokens = quantized(case.spec, quant), tokens_of()
    found = ImageDriver(build_native(case.spec, weights, dtype="bfloat16"), case).run("a", tokens)
    expected = ImageDriver(build(case.spec, weights), case).run("a", tokens)
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)


@pytest.mark.parametrize("num_added", [1, 2])
def test_rows_are_added_behind_the_layer_that_they_are_for(num_added: int) -> None:
    """The rows of the last part are added behind the last layer here, so the norm of the head is all that reads them."""
    spec = by_axes(NARROW, [0, 1, 2])
    case = Case(spec, num_added=num_added)
    driver = ImageDriver(build_native(spec, RandomWeights(spec)), case)
    batch = driver.plan({"a": tokens_of(40)})
    before = driver.program.step(batch, HIDDEN).hidden
    changed_rows = np.array(batch.embeddings)
    changed_rows[:, -spec.hidden_size :] += 1
    found = driver.program.step(replace(batch, embeddings=changed_rows), HIDDEN).hidden
    differing = np.flatnonzero(np.abs(found - before).max(1) > 1e-3)
    assert batch.embedding_rows is not None
    if num_added == 2:
        assert differing.tolist() == batch.embedding_rows.tolist()
    else:  # behind the first of two layers: the last one's attention carries it to what follows
        assert differing.tolist() == list(range(5, 40))


def make(case: Case, weights: Weights, options: Mapping[str, Any], block_size: int, num_threads: int) -> Driver:
    sizes = {"num_blocks": 8192 // block_size, "block_size": block_size, "num_threads": num_threads}
    return ImageDriver(build_native(case.spec, weights, **sizes, **options), case)


FORMS = {
    "float32": ("none", {"dtype": "float32"}),
    "bfloat16": ("none", {"dtype": "bfloat16"}),
    "int8, KV int8": ("int8", {"dtype": "bfloat16", "kv_dtype": "int8"}),
    "int4": ("int4", {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    ("name", "form"),
    cover([name for name in CASES if name != "latent attention"], FORMS),
)
def test_no_arrangement_changes_a_bit(name: str, form: str) -> None:
    quant, options = FORMS[form]
    case = CASES[name]
    made = partial(make, case, quantized(case.spec, quant), options)
    arrangements = {"chunks": (7, 50, 100) if case.whole else (1, 33, 64), "block_sizes": (5,), "companions": (3, 20)}
    assert differing_arrangements(made, tokens_of(), vocab=320, **arrangements) == []


@pytest.mark.parametrize(
    ("name", "form", "kernels"),
    cover(["sections in turns, added rows", "images seen whole, a window in one layer"], FORMS, KERNELS[1:]),
)
def test_no_arrangement_changes_a_bit_on_other_instruction_sets(name: str, form: str, kernels: str) -> None:
    quant, options = FORMS[form]
    made = partial(make, CASES[name], quantized(CASES[name].spec, quant), {**options, "kernels": kernels})
    arrangements = {"chunks": (50,), "block_sizes": (5,), "companions": (9,)}
    assert differing_arrangements(made, tokens_of(), vocab=320, **arrangements) == []


@pytest.mark.parametrize(("form", "name"), cover(KV_FORMS, ["images seen whole", "images seen whole, a window"]))
def test_images_that_span_splits_of_attention_are_seen_whole(name: str, form: str) -> None:
    """Images of up to 330 positions: longer than a split of keys, than a task's rows, and than the window."""
    case = replace(CASES[name], whole=LONG)
    tokens, weights = tokens_of(560), RandomWeights(case.spec)
    options = {"num_blocks": 200, "block_size": 16, **KV_FORMS[form]}
    found = ImageDriver(build_native(case.spec, weights, **options), case).run("a", tokens)
    expected = ImageDriver(build(case.spec, weights, num_blocks=200), case).run("a", tokens)
    bound = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.03, "int4": 0.2}[form]
    assert np.linalg.norm(found - expected) < bound * np.linalg.norm(expected)
    options |= {"block_size": 5, "num_blocks": 400, "num_threads": 2}
    for cuts in ((0, 160, 200, 560), (0, 168, 531, 560), (0, 161, 540, 560)):
        driver = ImageDriver(build_native(case.spec, weights, **options), case)
        steps = [{"b": tokens_of(5), "a": tokens[start:end]} for start, end in pairwise(cuts)]
        assert np.concatenate([driver.step(parts)["a"] for parts in steps]).tobytes() == found.tobytes()


TREE = (
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    8,
    9,
    9,
    12,
)  # nine known tokens, an image of seven among them, and drafts behind the last
"""Parents."""


@pytest.mark.parametrize(
    ("name", "length", "backend"),
    cover(
        ["sections in turns, added rows", "images seen whole", "images seen whole, a window"], [27, 251], ["native", "torch"]
    ),
)
def test_drafts_in_the_step_that_computes_an_image_keep_their_bits(name: str, length: int, backend: str) -> None:
    case = CASES[name]
    driver = ImageDriver(build(case.spec, RandomWeights(case.spec), num_blocks=800, block_size=5, backend=backend), case)
    driver.run("base", tokens_of(length))
    driver.share("base", "tree", length)
    tokens = tokens_of(len(TREE), seed=9)
    batch = driver.place_images(plan_trees(driver, {"other": tokens_of(20), "tree": tokens}, {"tree": TREE}))
    logits = driver.program.step(batch, LOGITS).logits[20:]
    for node in range(8, len(TREE)):
        alone = run_path(driver, "base", node, [tokens[place] for place in path_to(TREE, node)])[-1]
        assert logits[node].tobytes() == alone.tobytes(), node
    if case.whole:
        cut = driver.program.step(replace(batch, last_seen=None), LOGITS).logits[20:]
        assert np.abs(cut[8] - logits[8]).max() > 1e-3


@pytest.mark.parametrize("wants", [LOGITS, GREEDY, HIDDEN, KV_ONLY])
def test_what_does_not_fit_is_refused_before_anything_is_written(wants: Any) -> None:
    spec = by_axes(NARROW, [0, 1, 2])
    driver = build_native(spec, RandomWeights(spec), num_blocks=1)
    batch = driver.plan({"a": [1, 2, 3, 4]})
    turns, seen = np.tile(batch.positions, (3, 1)), batch.positions
    rows: FloatArray = np.ones((1, 4 * spec.hidden_size), np.float32)
    for wrong, word in (
        ({"rope_positions": turns + (1 << 22)}, "a position that no model has"),
        ({"rope_positions": turns - 1}, "a position that no model has"),
        ({"rope_positions": turns[:2].copy()}, "three positions"),
        ({"rope_positions": turns[:, 1:].copy()}, "three positions"),
        ({"rope_positions": turns.astype(np.int64)}, "three positions"),
        ({"last_seen": seen[1:].copy()}, "last positions"),
        ({"last_seen": seen + 1}, "not in its step"),
        ({"last_seen": seen - 1}, "not in its step"),
        ({"last_seen": np.array([0, 3, 2, 3], np.int32)}, "less than the one before"),
        ({"last_seen": np.array([0, 1, 3, 3], np.int32), "parents": np.array([-1, 0, 1, 1], np.int32)}, "not in its step"),
        ({"embeddings": rows, "embedding_rows": np.zeros(1, np.int32)}, "more layers than the model has"),
    ):
        with pytest.raises(ValueError, match=word):
            driver.program.step(replace(batch, **wrong), wants)
    assert not any(driver.program.read_block(0, 0))  # type: ignore[attr-defined]
    driver.program.step(replace(batch, rope_positions=turns, last_seen=np.array([0, 3, 3, 3], np.int32)), wants)
    assert any(driver.program.read_block(0, 0))  # type: ignore[attr-defined]


def test_three_positions_without_a_rotation_for_them_are_refused() -> None:
    for backend in ("torch", "native"):
        driver = build(NARROW, RandomWeights(NARROW), num_blocks=1, backend=backend)
        batch = driver.plan({"a": [1, 2, 3]})
        turns = np.tile(batch.positions, (3, 1))
        turns[1] += 1
        with pytest.raises(ValueError, match="which of them turns each frequency"):
            driver.program.step(replace(batch, rope_positions=turns), LOGITS)
