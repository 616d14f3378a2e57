"""Documents that are weighed by a temperature and a scale: the oracle's numbers, and the same bits in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloister.backends.base import LOGITS, FloatArray, ForwardBatch
from cloister.backends.spec import DecoderSpec
from tests.driving import Driver, RandomWeights, build
from tests.native import NARROW, PARTS, build_native, changed
from tests.thinning import cover
from tests.token_trees import KV_FORMS, path_to, plan_trees

LENGTH = 570
RANGES = ((20, 60), (200, 300), (5, 570), (256, 512))  # inside of a split of 256 keys, across its end, and over several
WEIGHTS = (0.7, 0.9)
QUESTION = tuple(range(11, 29))


def random_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 320, count)]


def start(settings: Mapping[str, Any], spec: DecoderSpec = NARROW) -> Driver:
    driver = build(spec, RandomWeights(spec), **{"backend": "native", "num_blocks": 800, "block_size": 5, **settings})
    driver.run("base", random_tokens(1, LENGTH))
    return driver


def weigh(batch: ForwardBatch, *given: tuple[tuple[int, int], tuple[float, float]] | None) -> ForwardBatch:
    """Returns a batch with the documents of each sequence and their weights; None weighs none."""
    ranges = np.array([(0, 0) if each is None else each[0] for each in given], np.int32)
    weights = np.array([(1, 1) if each is None else each[1] for each in given], np.float32)
    return replace(batch, document_ranges=ranges, document_weights=weights)


def ask(driver: Driver, seq: object, documents: tuple[int, int], chunk: int = len(QUESTION), weights=WEIGHTS) -> FloatArray:
    """Logits of the question behind the base, in chunks."""
    driver.share("base", seq, LENGTH)
    return np.concatenate(
        [
            driver.program.step(weigh(driver.plan({seq: QUESTION[i : i + chunk]}), (documents, weights)), LOGITS).logits
            for i in range(0, len(QUESTION), chunk)
        ]
    )


@pytest.mark.parametrize(("documents", "part"), cover(RANGES, ("plain", "sinks", "softcaps", "latent")))
def test_the_native_back_end_weighs_documents_as_the_oracle(documents: tuple[int, int], part: str) -> None:
    spec = {
        "plain": NARROW,
        "softcaps": changed(NARROW, attention={"softcap": 5.0}),
        "sinks": changed(NARROW, attention={"sinks": True}),
        "latent": PARTS["latent attention"],
    }[part]
    wanted, found = (ask(start({"backend": name}, spec), "asked", documents) for name in ("torch", "native"))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_weights_of_one_are_plain_attention_and_others_are_not(backend: str) -> None:
    driver = start({"backend": backend})
    driver.share("base", "plain", LENGTH)
    plain = driver.run("plain", QUESTION)
    largest = np.abs(plain).max()
    assert np.abs(ask(driver, "ones", (200, 300), weights=(1.0, 1.0)) - plain).max() < 1e-5 * largest
    assert np.abs(ask(driver, "cold", (200, 300), weights=(0.5, 1.0)) - plain).max() > 1e-3 * largest
    assert np.abs(ask(driver, "small", (200, 300), weights=(1.0, 0.5)) - plain).max() > 1e-3 * largest


@pytest.mark.parametrize(("documents", "form"), cover(RANGES, ("torch", *KV_FORMS)))
def test_weighed_documents_have_the_same_bits_in_chunks_company_blocks_and_threads(
    documents: tuple[int, int], form: str
) -> None:
    settings = {"backend": "torch"} if form == "torch" else KV_FORMS[form]
    driver = start(settings)
    wanted = ask(driver, "whole", documents)
    assert ask(driver, "chunks", documents, 5).tobytes() == wanted.tobytes()
    assert ask(start({**settings, "block_size": 16, "num_threads": 3}), "asked", documents).tobytes() == wanted.tobytes()
    for seq in ("asked", "other", "plain", "one"):
        driver.share("base", seq, LENGTH)
    parts: dict[object, Sequence[int]] = {"plain": QUESTION[:2], "other": QUESTION[:7], "asked": QUESTION, "one": QUESTION[:1]}
    batch = weigh(driver.plan(parts), None, ((0, 255), (1.3, 1.1)), (documents, WEIGHTS), (documents, WEIGHTS))
    logits = driver.program.step(batch, LOGITS).logits
    assert logits[9 : 9 + len(QUESTION)].tobytes() == wanted.tobytes()
    assert logits[-1].tobytes() == wanted[0].tobytes()
    driver.share("base", "alone", LENGTH)
    assert logits[:2].tobytes() == driver.run("alone", QUESTION[:2]).tobytes(), "others' weights changed a plain sequence"


@pytest.mark.parametrize("settings", [{"backend": "torch"}, {"num_threads": 2}], ids=str)
@pytest.mark.parametrize("documents", [(500, 520), (20, 570)])
def test_nodes_of_a_tree_weigh_documents_as_chains_do(settings: dict[str, Any], documents: tuple[int, int]) -> None:
    driver, parents, tokens = start(settings), (-1, -1, 0, 0, 1, 2), (11, 12, 13, 14, 15, 16)
    driver.share("base", "tree", LENGTH)
    batch = weigh(plan_trees(driver, {"tree": tokens}, {"tree": parents}), (documents, WEIGHTS))
    logits = driver.program.step(batch, LOGITS).logits
    for node in range(len(tokens)):
        path = [tokens[place] for place in path_to(parents, node)]
        driver.share("base", node, LENGTH)
        alone = driver.program.step(weigh(driver.plan({node: path}), (documents, WEIGHTS)), LOGITS).logits[-1]
        assert logits[node].tobytes() == alone.tobytes(), node


@pytest.mark.parametrize(
    ("documents", "weights", "what"),
    [
        ((8, 18), (1.0, 0.9), "stand before"),
        ((8, 4), (1.0, 0.9), "stand before"),
        ((-1, 4), (1.0, 0.9), "stand before"),
        ((0, 4), (0.0, 1.0), "above 0"),
        ((0, 4), (1.0, float("nan")), "above 0"),
    ],
)
def test_documents_that_cannot_be_weighed_are_refused(
    documents: tuple[int, int], weights: tuple[float, float], what: str
) -> None:
    driver = build_native(NARROW, RandomWeights(NARROW), num_blocks=8)
    driver.run("a", list(range(17)))
    batch = driver.plan({"a": [1]})
    with pytest.raises(ValueError, match=what):
        driver.program.step(weigh(batch, (documents, weights)), LOGITS)
    with pytest.raises(ValueError, match="each sequence"):
        driver.program.step(weigh(batch, ((0, 4), WEIGHTS), None), LOGITS)
