"""Attention of a prefix whose blocks several sequences share: computed once for all, with the bits of each one alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from cloister.backends.base import LOGITS, FloatArray
from cloister.backends.spec import DecoderSpec, LayerSpec
from tests.driving import Driver, RandomWeights
from tests.native import LATENT, SMALL, build_native, changed, in_turns

SINKS = changed(SMALL, attention={"sinks": True, "softcap": 3.0})
WINDOWED = changed(SMALL, attention={"window": 90})
LATENTS = replace(SMALL, layers=(LayerSpec(LATENT, SMALL.layers[0].mlp),) * 2)
TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, 900).tolist()
FORMS = {  # what is attended to, the type of the arithmetic, and that of the KV
    "float32": (SMALL, "float32", None),
    "bfloat16": (SMALL, "bfloat16", None),
    "KV int8": (SMALL, "bfloat16", "int8"),
    "KV int4": (SMALL, "bfloat16", "int4"),
    "sinks": (SINKS, "bfloat16", None),
    "latent": (LATENTS, "bfloat16", None),
}

random_weights = cache(RandomWeights)


def make(spec: DecoderSpec, **options: object) -> Driver:
    """Builds a program of one thread, which never cuts attention into more phases for want of tasks."""
    return build_native(spec, random_weights(spec), num_blocks=512, **options)


def share(driver: Driver, lengths: Mapping[str, int]) -> None:
    """Gives sequences the first tokens of `owner`, which computes all of them."""
    driver.run("owner", TOKENS, 300)
    for name, length in lengths.items():
        driver.share("owner", name, length)


def step(driver: Driver, parts: Mapping[str, Sequence[int]]) -> tuple[dict[str, FloatArray], int]:
    """Returns the logits of each sequence, and how many phases the step had."""
    phases = driver.program.num_phases  # type: ignore[attr-defined]
    logits = driver.step(parts)
    return logits, driver.program.num_phases - phases  # type: ignore[attr-defined]


@pytest.mark.parametrize(("form", "kernels"), in_turns(FORMS))
def test_sequences_that_share_blocks_get_the_bits_of_each_alone(form: str, kernels: str) -> None:
    spec, dtype, kv_dtype = FORMS[form]
    driver = make(spec, dtype=dtype, kv_dtype=kv_dtype, kernels=kernels)
    lengths = {"a": 880, "b": 810, "c": 555, "d": 540, "e": 270, "f": 200}
    parts = {name: TOKENS[length : length + 1 + number] for number, (name, length) in enumerate(lengths.items())}

    share(driver, lengths)
    together, num_shared = step(driver, parts)
    for name in lengths:
        driver.forget(name, "owner")
    alone = {}
    for name, length in lengths.items():
        driver.share("owner", name, length)
        logits, num_alone = step(driver, {name: parts[name]})
        alone[name] = logits[name]
        driver.forget(name, "owner")

    for name in lengths:
        assert together[name].tobytes() == alone[name].tobytes(), name
    assert num_shared > num_alone  # else nothing was shared


def test_a_tree_of_drafts_behind_a_shared_prefix_gets_its_own_bits() -> None:
    driver = make(SMALL, dtype="bfloat16")
    share(driver, {"a": 600, "b": 600})
    batch = driver.plan({"a": [1, 2, 3], "b": [4]}, logit_rows=[0, 1, 2, 3])
    tree = replace(batch, parents=np.array([-1, 0, 0, -1], np.int32), positions=np.array([600, 601, 601, 600], np.int32))
    together = driver.program.step(tree, LOGITS).logits

    driver.cut("a", 600)
    alone_batch = driver.plan({"a": [1, 2, 3]}, logit_rows=[0, 1, 2])
    alone_tree = replace(alone_batch, parents=np.array([-1, 0, 0], np.int32), positions=np.array([600, 601, 601], np.int32))
    assert together[:3].tobytes() == driver.program.step(alone_tree, LOGITS).logits.tobytes()


@pytest.mark.parametrize(
    ("what", "spec", "lengths", "num_tokens"),
    [
        ("behind a window", WINDOWED, (600, 600), 1),
        ("shorter than a split", SMALL, (250, 250), 1),
        ("with a long part of a prompt", SMALL, (600, 600), 9),
    ],
)
def test_nothing_is_shared(what: str, spec: DecoderSpec, lengths: tuple[int, int], num_tokens: int) -> None:
    driver = make(spec, dtype="bfloat16")
    share(driver, dict(zip("ab", lengths, strict=True)))
    parts = dict(zip("ab", [TOKENS[:num_tokens], TOKENS[1 : num_tokens + 1]], strict=True))
    _, num_together = step(driver, parts)
    _, num_alone = step(driver, {"a": [5]})
    assert num_together == num_alone, what


def test_sequences_of_equal_text_in_blocks_of_their_own_share_nothing() -> None:
    driver = make(SMALL, dtype="bfloat16")
    driver.run("a", TOKENS[:600])
    driver.run("b", TOKENS[:600])
    _, num_together = step(driver, {"a": [1], "b": [1]})
    _, num_alone = step(driver, {"a": [1]})
    assert num_together == num_alone
