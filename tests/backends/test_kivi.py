"""KV in 2 bits: what is packed when, and that nothing but a position decides which form of a key its query reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import LOGITS, FloatArray, KVLayout
from cloister.backends.kivi import GROUP, KIVI, RECENT_WINDOW, first_recent, round_groups
from cloister.backends.native import _native
from cloister.backends.native.program import KV_KINDS
from cloister.backends.spec import DecoderSpec, LayerSpec
from cloister.types.errors import ConfigError
from tests.batch_invariance import differing_arrangements
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.native import KERNELS, LATENT, MANY_HEADS, NARROW, SMALL, WINDOWED, changed
from tests.token_trees import keep_path, path_to, plan_trees, run_path

BLOCK = 32
TINY = make_spec(hidden=64, intermediate=48, heads=(4, 2), head_dim=24)
"""Heads whose values are no whole groups."""
TORCH: dict[str, Any] = {"backend": "torch", "kv_dtype": KIVI}
NATIVE: dict[str, Any] = {"backend": "native", "dtype": "bfloat16", "kv_dtype": KIVI}
BOTH = [TORCH, NATIVE]
ON_EACH_SET = [{**NATIVE, "kernels": name} for name in KERNELS]
LATENT_SPEC = replace(SMALL, layers=(LayerSpec(LATENT, SMALL.layers[0].mlp),) * 2)
TOKENS = (11, 12, 13, 14, 15, 16, 17, 18, 19)
PARENTS = (-1, -1, 1, 1, 0, 3, 3, 6, 5)
LEAF = 7  # at the end of the longest path, 1, 3, 6, 7: its nodes have to be moved


def start(spec: DecoderSpec, settings: dict[str, Any], **more: Any) -> Driver:
    return build(spec, RandomWeights(spec), **{"num_blocks": 160, "block_size": BLOCK, **settings, **more})


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 320, count)]


def differing(spec: DecoderSpec, settings: dict[str, Any], count: int, **arrangements: Any) -> list[str]:
    def make(block_size: int, num_threads: int) -> Driver:
        size = max(BLOCK, block_size)
        return start(spec, settings, num_blocks=4096 // size, block_size=size, num_threads=num_threads)

    few = {"chunks": (7, 90), "block_sizes": (), "companions": (3,), **arrangements}
    return differing_arrangements(make, random_tokens(1, count), vocab=320, **few)


@pytest.mark.parametrize("settings", ON_EACH_SET, ids=str)
def test_no_arrangement_changes_a_bit(settings: dict[str, Any]) -> None:
    assert differing(NARROW, settings, 301) == []


def test_no_arrangement_changes_a_bit_of_the_reference() -> None:
    assert differing(TINY, TORCH, 140) == []


@pytest.mark.parametrize("spec", [changed(WINDOWED, attention={"window": 90}), MANY_HEADS, TINY])
def test_windows_and_heads_of_odd_sizes_keep_their_bits_too(spec: DecoderSpec) -> None:
    assert differing(spec, NATIVE, 280, companions=(9,)) == []


@pytest.mark.parametrize("settings", [{**TORCH, "dtype": "bfloat16"}, *ON_EACH_SET], ids=str)
def test_a_block_is_packed_from_what_the_newest_positions_are(settings: dict[str, Any]) -> None:
    driver = start(TINY, settings)
    driver.run("a", random_tokens(2, 70), 33)
    for block in driver.blocks("a")[:2]:
        contents = driver.program.export_blocks(driver.entry(block))
        for layer, (packed, recent) in enumerate(zip(*map(halves, contents), strict=True)):
            keys, values = unpack_recent(recent, settings["backend"])
            found_keys, found_values = unpack(packed, settings["backend"])
            np.testing.assert_array_equal(found_keys, round_by_channel(keys), err_msg=f"keys of layer {layer}")
            np.testing.assert_array_equal(found_values, round_by_token(values), err_msg=f"values of layer {layer}")
            assert np.abs(keys - found_keys).max() > 0.01


def halves(content: bytes) -> tuple[npt.NDArray[np.uint8], ...]:
    """Returns the parts of two layers of a block."""
    return tuple(np.frombuffer(content, np.uint8).reshape(2, -1))


def round_by_channel(keys: FloatArray) -> FloatArray:
    """Rounds keys [heads, 32, head_dim]."""
    return round_groups(keys.swapaxes(1, 2), keys=True).swapaxes(1, 2)


def round_by_token(values: FloatArray) -> FloatArray:
    return np.concatenate(
        [round_groups(part, keys=False) for part in np.split(values, range(GROUP, values.shape[-1], GROUP), axis=-1)], -1
    )


def unpack_recent(content: npt.NDArray[np.uint8], backend: str) -> tuple[FloatArray, FloatArray]:
    """Returns keys and values of a block of `TINY`, [2, 32, 24]."""
    numbers = content.view(ml_dtypes.bfloat16).astype(np.float32)
    if backend == "torch":
        keys, values = numbers.reshape(BLOCK, 2, 2, 24).transpose(1, 2, 0, 3)
        return keys, values
    keys, values = numbers.reshape(2, 2, -1).swapaxes(0, 1)
    keys = keys.reshape(2, 16, BLOCK, 2).transpose(0, 2, 1, 3).reshape(2, BLOCK, 32)
    values = values.reshape(2, BLOCK // 2, 32, 2).transpose(0, 1, 3, 2).reshape(2, BLOCK, 32)
    return keys[..., :24], values[..., :24]


def unpack(content: npt.NDArray[np.uint8], backend: str) -> tuple[FloatArray, FloatArray]:
    """The same of a packed block."""
    codes = (content[:, None] >> np.arange(0, 8, 2) & 3).astype(np.float32)
    scales = content.view(ml_dtypes.bfloat16).astype(np.float32)
    if backend == "torch":
        keys = codes[: 8 * 48].reshape(8, 48, 4).swapaxes(1, 2).reshape(BLOCK, 2, 24).swapaxes(0, 1)
        values = codes[8 * 48 : 8 * 48 + BLOCK * 16].reshape(BLOCK, 2, 32).swapaxes(0, 1)
        rest = scales[(8 * 48 + BLOCK * 16) // 2 :]
        key_scale, key_zero = rest[: 2 * 48].reshape(2, 2, 1, 24)
        value_scale, value_zero = np.moveaxis(rest[2 * 48 :].reshape(BLOCK, 2, 2), (0, 1, 2), (2, 1, 0))[..., None]
    else:
        heads = content.reshape(2, -1)
        codes, scales = codes.reshape(2, -1), scales.reshape(2, -1)
        assert heads.shape[1] == 768
        keys = codes[:, : 32 * 32].reshape(2, 32, BLOCK).swapaxes(1, 2)[..., :24]
        values = codes[:, 1024:2048].reshape(2, BLOCK, 32)
        key_scale, key_zero = np.moveaxis(scales[:, 256:320].reshape(2, 1, 32, 2), 3, 0)[..., :24]
        value_scale, value_zero = np.moveaxis(scales[:, 320:].reshape(2, BLOCK, 1, 2), 3, 0)
    return keys * key_scale + key_zero, values[..., :24] * value_scale + value_zero


def test_both_back_ends_lose_the_same() -> None:
    tokens, spec = random_tokens(3, 260), changed(NARROW)
    found = {name: start(spec, settings).run("a", tokens) for name, settings in zip(("torch", "native"), BOTH, strict=True)}
    exact = start(spec, {"backend": "torch"}).run("a", tokens)
    lost = np.linalg.norm(found["torch"] - exact)
    assert np.array_equal(found["torch"][:RECENT_WINDOW], exact[:RECENT_WINDOW])  # nothing was packed yet
    assert lost > 0.05 * np.linalg.norm(exact)
    assert np.linalg.norm(found["native"] - found["torch"]) < 0.35 * lost


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_what_is_behind_the_newest_positions_is_not_read_unpacked(settings: dict[str, Any]) -> None:
    tokens, driver = random_tokens(4, 200), start(TINY, settings)
    expected = driver.run("whole", tokens)[150:]
    driver.run("a", tokens[:150])
    behind = driver.blocks("a")[: first_recent(150, BLOCK) // BLOCK]
    noise = [np.random.default_rng(0).bytes(len(c)) for c in driver.program.export_blocks([driver.entry(b)[1] for b in behind])]
    driver.program.import_blocks([driver.entry(block)[1] for block in behind], noise)
    assert driver.run("a", tokens[150:]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_exported_blocks_are_all_that_a_prefix_is(settings: dict[str, Any]) -> None:
    tokens, source, target = random_tokens(5, 170), start(TINY, settings), start(TINY, settings, num_blocks=20)
    expected = source.run("a", tokens)[160:]
    target.run("a", [0] * 160)
    for ours, theirs in zip(source.blocks("a")[:5], target.blocks("a"), strict=True):
        target.program.import_blocks(target.entry(theirs), source.program.export_blocks(source.entry(ours)))
    assert target.run("a", tokens[160:]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_drafts_that_were_rejected_leave_nothing_packed(settings: dict[str, Any]) -> None:
    tokens, driver = random_tokens(6, 200), start(TINY, settings)
    expected = driver.run("chain", tokens)
    found = [driver.run("drafting", tokens[:90])]
    while driver.length("drafting") < len(tokens):
        done = driver.length("drafting")
        right = tokens[done : done + 2]
        wrong = [(token + 1) % 320 for token in tokens[done : done + 7]]
        found.append(driver.step({"drafting": [*right, *wrong]})["drafting"][: len(right)])
        driver.cut("drafting", done + len(right))
    assert np.concatenate(found).tobytes() == expected.tobytes()


@pytest.mark.parametrize("settings", BOTH, ids=str)
@pytest.mark.parametrize("length", [60, 94, 253])
def test_nodes_of_trees_have_the_bits_of_their_paths(settings: dict[str, Any], length: int) -> None:
    driver = start(TINY, settings)
    driver.run("base", random_tokens(7, length))
    driver.share("base", "tree", length)
    parts: dict[object, Sequence[int]] = {"other": [3, 1, 2], "tree": TOKENS}
    logits = driver.program.step(plan_trees(driver, parts, {"tree": PARENTS}), LOGITS).logits[-len(TOKENS) :]
    for node in range(len(TOKENS)):
        alone = run_path(driver, "base", node, [TOKENS[place] for place in path_to(PARENTS, node)])[-1]
        assert logits[node].tobytes() == alone.tobytes()


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_a_path_that_fills_a_block_is_packed_when_it_is_moved(settings: dict[str, Any]) -> None:
    driver, path = start(TINY, settings), path_to(PARENTS, LEAF)
    driver.run("chain", random_tokens(8, 92))
    driver.share("chain", "tree", 92)
    driver.program.step(plan_trees(driver, {"tree": TOKENS}, {"tree": PARENTS}), LOGITS)
    keep_path(driver, "tree", len(TOKENS), path)  # up to 96 positions
    driver.run("chain", [TOKENS[node] for node in path])
    more = random_tokens(9, 100)
    logits = driver.step({"tree": more, "chain": more})
    assert driver.length("chain") == 196
    assert logits["tree"].tobytes() == logits["chain"].tobytes()


def test_numbers_that_are_none_do_not_disappear() -> None:
    numbers = np.ones((2, GROUP), np.float32)
    numbers[0, 5] = np.inf
    assert np.isnan(round_groups(numbers, keys=True)).all(1).tolist() == [True, False]


def test_a_token_takes_three_bits_a_number() -> None:
    heads, dim, size = 2, 64, 64
    bits = {
        name: 8 * _native.kv_block_bytes(kind, heads, dim, 0, size) / (2 * heads * dim * size)
        for name, kind in KV_KINDS.items()
    }
    assert (bits["bfloat16"], bits["int4"], bits[KIVI]) == (16, 6.75, 3)


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_blocks_that_hold_no_whole_groups_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="set --block-size 32"):
        start(TINY, settings, block_size=16)


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_latents_are_not_packed(settings: dict[str, Any]) -> None:
    options = {name: value for name, value in settings.items() if name != "backend"}
    backend = BACKENDS.get(settings["backend"])(num_threads=1, device="cpu", **options)
    with pytest.raises(ConfigError, match="latents"):
        backend.need(LATENT_SPEC, RandomWeights(LATENT_SPEC), block_size=32, max_batched_tokens=8)


@pytest.mark.parametrize("settings", BOTH, ids=str)
def test_a_cache_without_groups_packs_nothing(settings: dict[str, Any]) -> None:
    options = {name: value for name, value in settings.items() if name != "backend"}
    maker = BACKENDS.get(settings["backend"])(num_threads=1, device="cpu", **options)
    driver = Driver(maker.build(TINY, RandomWeights(TINY), KVLayout(40, 16)), 40, 16)
    unpacked = start(TINY, {**settings, "kv_dtype": None})
    tokens = random_tokens(10, 150)
    assert driver.run("a", tokens).tobytes() == unpacked.run("a", tokens).tobytes()
