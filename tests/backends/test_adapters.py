"""Low-rank adapters on both back ends: the numbers of merged weights, and batch invariance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cloister.backends.base import LOGITS, FloatArray
from cloister.backends.tensors import dequantized
from cloister.models import load
from cloister.models.adapters import read_adapter
from cloister.quant import FORMATS, FormatOptions, QuantizedWeights
from tests.adapter_factory import MergedWeights, random_adapter
from tests.driving import Driver, RandomWeights, build, make_spec
from tests.model_factory import UNTYPED, make_model
from tests.thinning import cover, thin

CODED = make_spec(hidden=128, intermediate=192, heads=(4, 2), head_dim=32)  # sizes that every number format has
SPEC = make_spec(hidden=96, intermediate=100, heads=(6, 2), head_dim=16)
TOKENS = torch.randint(320, (90,), generator=torch.Generator().manual_seed(1)).tolist()
BACKENDS = ["torch", "native"]
FAMILIES = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "phi3", "gpt2", "opt", "gpt_neox", "olmo2", "granite"), "all-linear"),
    "mixtral": ["q_proj", "k_proj", "v_proj", "o_proj"],  # experts are not changed
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def drive(driver: Driver, parts: Mapping[Any, Sequence[int]], slots: Mapping[Any, int]) -> dict[Any, FloatArray]:
    """A step in which sequences have adapters; -1 is none."""
    batch = replace(driver.plan(parts), adapters=np.array([slots[seq] for seq in parts], np.int32))
    ends = np.cumsum([len(tokens) for tokens in parts.values()])
    return dict(zip(parts, np.split(driver.program.step(batch, LOGITS).logits, ends[:-1]), strict=True))


def with_adapters(backend: str, num_adapters: int, **options: Any) -> Driver:
    """A program with adapters of several ranks in slots 0, 1, ..."""
    driver = build(SPEC, RandomWeights(SPEC), backend=backend, **options)
    for slot in range(num_adapters):
        driver.program.load_adapter(slot, random_adapter(SPEC, (8, 5, 16, 1)[slot % 4], seed=slot, size=0.5))  # type: ignore[attr-defined]
    return driver


def test_an_adapter_computes_what_merged_weights_compute(backend: str) -> None:
    driver = with_adapters(backend, 2)
    for slot in range(2):
        merged = MergedWeights(RandomWeights(SPEC), random_adapter(SPEC, (8, 5)[slot], seed=slot, size=0.5))
        expected = build(SPEC, merged, backend=backend).run("a", TOKENS)
        found = drive(driver, {slot: TOKENS}, {slot: slot})[slot]
        assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    plain = build(SPEC, RandomWeights(SPEC), backend=backend).run("a", TOKENS)
    assert np.abs(plain - expected).max() > 0.1 * np.abs(expected).max()


class ReadWeights(RandomWeights):
    """Other weights, as the numbers that their codes stand for."""

    def __init__(self, weights: QuantizedWeights) -> None:
        self._tensors = {name: dequantized(tensor) for name, tensor in weights}


@pytest.mark.parametrize(("name", "dtype"), cover(FORMATS.names(), ["float32", "bfloat16"]))
def test_an_adapter_is_added_to_a_base_in_few_bits(backend: str, name: str, dtype: str) -> None:
    """The base rounds its inputs to 8 bits and the adapter does not: the answer is as near to that of numbers as the base's."""
    weights = QuantizedWeights(RandomWeights(CODED), FORMATS.get(name)(FormatOptions()))
    adapter = random_adapter(CODED, 8, seed=1, size=0.5)
    numbers = build(CODED, ReadWeights(weights)).run("a", TOKENS)
    expected = build(CODED, MergedWeights(ReadWeights(weights), adapter)).run("a", TOKENS)
    driver = build(CODED, weights, backend=backend, dtype=dtype)
    base = driver.run("plain", TOKENS)
    driver.program.load_adapter(0, adapter)  # type: ignore[attr-defined]
    found = drive(driver, {"a": TOKENS}, {"a": 0})["a"]

    def distance(ours: FloatArray, theirs: FloatArray) -> float:
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))

    assert distance(base, expected) > 0.5
    assert distance(found, expected) < max(2 * distance(base, numbers), 0.02)
    again = drive(driver, {"b": TOKENS[:40], "c": TOKENS, "d": TOKENS}, {"b": 0, "c": -1, "d": 0})
    assert again["c"].tobytes() == base.tobytes()
    assert again["d"].tobytes() == found.tobytes()


@pytest.mark.parametrize("names", [("q",), ("v", "o"), ("gate",), ("up", "down"), ("k", "down")])
def test_an_adapter_may_change_some_products_only(backend: str, names: tuple[str, ...]) -> None:
    adapter = random_adapter(SPEC, 4, names=names)
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    driver.program.load_adapter(3, adapter)  # type: ignore[attr-defined]
    expected = build(SPEC, MergedWeights(RandomWeights(SPEC), adapter), backend=backend).run("a", TOKENS)
    found = drive(driver, {"a": TOKENS}, {"a": 3})["a"]
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


def test_an_adapter_of_heads_with_interleaved_rotation_changes_the_same_rows(backend: str) -> None:
    attention = SPEC.layers[0].grouped_attention
    assert attention.rope is not None
    turned = replace(attention, rope=replace(attention.rope, interleaved=True))
    spec = replace(SPEC, layers=tuple(replace(layer, attention=turned) for layer in SPEC.layers))
    adapter = random_adapter(spec, 4)
    driver = build(spec, RandomWeights(spec), backend=backend)
    driver.program.load_adapter(0, adapter)  # type: ignore[attr-defined]
    expected = build(spec, MergedWeights(RandomWeights(spec), adapter)).run("a", TOKENS)
    found = drive(driver, {"a": TOKENS}, {"a": 0})["a"]
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_company_changes_no_bit_of_an_answer_with_an_adapter_or_without(backend: str, dtype: str) -> None:
    """Alone or among others, prefill or decode, in one chunk or several, on one thread or two."""
    slots = {"a": 0, "b": 1, "c": -1, "d": 0, "e": 2}
    lengths = {"a": 70, "b": 33, "c": 41, "d": 5, "e": 90}
    alone = {}
    for seq, slot in slots.items():
        driver = with_adapters(backend, 3, dtype=dtype)
        alone[seq] = drive(driver, {seq: TOKENS[: lengths[seq]]}, {seq: slot})[seq]
    bare = build(SPEC, RandomWeights(SPEC), backend=backend, dtype=dtype).run("c", TOKENS[: lengths["c"]])
    assert bare.tobytes() == alone["c"].tobytes()
    for threads in (1, 2):
        driver = with_adapters(backend, 3, dtype=dtype, num_threads=threads)
        heads = drive(driver, {seq: TOKENS[: length - 1] for seq, length in lengths.items()}, slots)
        ends = drive(driver, {seq: [TOKENS[length - 1]] for seq, length in lengths.items()}, slots)
        for seq in slots:
            assert np.concatenate([heads[seq], ends[seq]]).tobytes() == alone[seq].tobytes(), (seq, threads)


def test_an_emptied_slot_changes_nothing(backend: str) -> None:
    driver = with_adapters(backend, 1)
    plain = build(SPEC, RandomWeights(SPEC), backend=backend).run("a", TOKENS)
    driver.program.unload_adapter(0)  # type: ignore[attr-defined]
    driver.program.unload_adapter(7)  # type: ignore[attr-defined]
    assert drive(driver, {"a": TOKENS}, {"a": 0})["a"].tobytes() == plain.tobytes()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what is about to be renamed
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")  # it sets it right by itself
@pytest.mark.parametrize("family", thin(FAMILIES, 4))
def test_answers_are_those_of_peft(backend: str, family: str, tmp_path: Path) -> None:
    import peft

    path = make_model(tmp_path / "model", family)
    config = peft.LoraConfig(
        r=6, lora_alpha=4, init_lora_weights=False, target_modules=FAMILIES[family], task_type="CAUSAL_LM", use_rslora=True
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = peft.get_peft_model(UNTYPED.from_pretrained(path, dtype=torch.float32), config).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    model = load(path)
    driver = build(model.spec, model.weights, backend=backend)
    adapter = read_adapter(tmp_path / "adapter", model.spec, max_rank=16)
    driver.program.load_adapter(0, adapter.weights)  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    found = drive(driver, {"a": TOKENS}, {"a": 0})["a"]
    assert np.abs(found - expected).max() < 3e-4 * np.abs(expected).max()
