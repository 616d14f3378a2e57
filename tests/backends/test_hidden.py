"""Hidden states after the final norm (`backends.base.Program`): those of transformers, and the same in any company."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from cloister.backends.availability import why_no_kernels
from cloister.backends.base import HIDDEN, Capability, FloatArray
from tests.adapter_factory import MergedWeights, random_adapter
from tests.driving import Driver, RandomWeights, build, build_from, make_spec
from tests.model_factory import make_model
from tests.thinning import thin

BACKENDS = ["torch"] + (["native"] if why_no_kernels() is None else [])
TOKENS = [int(token) for token in np.random.default_rng(0).integers(0, 320, 150)]
SPEC = make_spec(hidden=96, intermediate=100, heads=(3, 1), head_dim=24, window=50, qk_norm=True)

pytestmark = pytest.mark.parametrize("backend", BACKENDS)


def hidden(driver: Driver, tokens: list[int], chunk: int | None = None, company: int = 0) -> FloatArray:
    """Returns the hidden states of every token, computed `chunk` at a time beside `company` other sequences."""
    size, found = chunk or len(tokens), []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        batch = driver.plan({**{other: [other + 7] for other in range(company)}, "own": part})
        rows = np.arange(company, company + len(part), dtype=np.int32)
        found.append(driver.program.step(replace(batch, logit_rows=rows), HIDDEN).hidden)
    return np.concatenate(found)


@pytest.mark.parametrize(
    "family", thin(["llama", "qwen2", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "olmo2"], 3)
)
def test_hidden_states_are_those_of_transformers(backend: str, family: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, family)
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    assert np.abs(hidden(build_from(path, backend=backend), TOKENS) - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_keeps_its_bits_in_any_company_and_at_any_chunk_size(backend: str, dtype: str) -> None:
    def make(num_threads: int = 1) -> Driver:
        return build(SPEC, RandomWeights(SPEC), backend=backend, dtype=dtype, num_threads=num_threads)

    alone = hidden(make(), TOKENS)
    for chunk, company, num_threads in [(1, 0, 1), (7, 3, 1), (64, 40, 2), (150, 1, 2)]:
        assert (hidden(make(num_threads), TOKENS, chunk, company) == alone).all(), (chunk, company, num_threads)


def test_the_step_writes_the_same_keys_and_values_as_one_with_logits(backend: str) -> None:
    plain, asked = (build(SPEC, RandomWeights(SPEC), backend=backend) for _ in range(2))
    plain.run("own", TOKENS[:100])
    hidden(asked, TOKENS[:100])
    assert (plain.step({"own": TOKENS[100:]})["own"] == asked.step({"own": TOKENS[100:]})["own"]).all()


def test_no_rows_are_no_hidden_states(backend: str) -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    batch = driver.plan({"own": TOKENS}, logit_rows=[])
    assert driver.program.step(batch, HIDDEN).hidden.shape == (0, SPEC.hidden_size)


def test_an_adapter_counts_for_hidden_states_too(backend: str) -> None:
    driver = build(SPEC, RandomWeights(SPEC), backend=backend)
    if Capability.ADAPTERS not in driver.program.capabilities:
        pytest.skip("this back end runs no adapters yet")
    adapter = random_adapter(SPEC, 4, size=0.5)
    driver.program.load_adapter(0, adapter)
    batch = replace(driver.plan({"own": TOKENS}), adapters=np.array([0], np.int32))
    merged = build(SPEC, MergedWeights(RandomWeights(SPEC), adapter), backend=backend)
    expected = hidden(merged, TOKENS)
    assert np.abs(driver.program.step(batch, HIDDEN).hidden - expected).max() < 2e-4 * np.abs(expected).max()
