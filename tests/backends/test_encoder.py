"""An encoder's bits depend on a text alone, not on its company, nor on chunks, blocks and threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cloister.backends.base import KV_ONLY, LOGITS, Capability, Wants
from cloister.backends.encoder_spec import EncoderSpec
from cloister.backends.torch.encoder import ROWS_AT_ONCE, encoder_need
from cloister.models import load
from cloister.types.errors import EngineError
from tests.driving import Driver, build
from tests.encoder_factory import make_encoder
from tests.thinning import thin

ARCHITECTURES = ["BertForSequenceClassification", "XLMRobertaForSequenceClassification", "ModernBertForSequenceClassification"]
BOTH = Wants(hidden=True, logits=True)


def text(number: int, size: int) -> list[int]:
    ids: list[int] = np.random.default_rng(number).integers(4, 320, size).tolist()
    return ids


@pytest.fixture(scope="module", params=ARCHITECTURES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), request.param, num_labels=3)


def make(path: Path, *, block_size: int = 16, num_threads: int = 1, dtype: str = "float32") -> Driver:
    model = load(path)
    return build(model.spec, model.weights, block_size=block_size, num_threads=num_threads, dtype=dtype, num_blocks=4096)


def run(driver: Driver, texts: Mapping[int, Sequence[int]], chunk: int = 1000) -> dict[int, bytes]:
    """Computes texts side by side, `chunk` tokens of each a step, and returns the bytes of what each brings."""
    found: dict[int, bytes] = {}
    for start in range(0, max(map(len, texts.values())), chunk):
        parts = {name: tokens[start : start + chunk] for name, tokens in texts.items() if start < len(tokens)}
        ends = np.cumsum([len(part) for part in parts.values()])
        done = [(name, int(end) - 1) for name, end in zip(parts, ends, strict=True) if start + chunk >= len(texts[name])]
        batch = driver.plan(parts, [row for _, row in done])
        types = np.concatenate([np.arange(start, start + len(part)) % 2 for part in parts.values()]).astype(np.int32)
        output = driver.program.step(replace(batch, token_types=types), BOTH)
        states = np.split(output.hidden, np.cumsum([len(texts[name]) for name, _ in done])[:-1]) if done else []
        for number, ((name, _), hidden) in enumerate(zip(done, states, strict=True)):
            found[name] = hidden.tobytes() + output.logits[number].tobytes()
    for name in texts:
        driver.free(name)
    return found


@pytest.mark.parametrize("dtype", thin(["float32", "bfloat16"], 1))
def test_a_text_has_the_same_bits_in_any_company_and_chunks(path: Path, dtype: str) -> None:
    texts = {number: text(number, 1 + 37 * number % 290) for number in range(24)}
    driver = make(path, dtype=dtype)
    alone: dict[int, bytes] = {}
    for name, tokens in texts.items():
        alone |= run(driver, {name: tokens})
    assert sum(map(len, texts.values())) > ROWS_AT_ONCE, "they must be too many for one run"
    assert run(driver, texts) == alone
    assert run(driver, texts, chunk=31) == alone
    assert run(make(path, block_size=5, dtype=dtype), texts) == alone
    assert run(make(path, num_threads=2, dtype=dtype), texts, chunk=150) == alone


def test_wiped_blocks_hold_no_token(path: Path) -> None:
    driver = make(path)
    driver.program.step(driver.plan({1: text(1, 100)}, []), KV_ONLY)
    kept = driver.program._tokens  # type: ignore[attr-defined]
    assert kept.any()
    driver.program.copy_blocks([(driver.blocks(1)[0], next(i for i in range(4096) if i not in driver.blocks(1)))])
    driver.free(1)
    assert np.count_nonzero(kept.any(1)) == 16, "the copy"
    driver.program.wipe_blocks(range(4096))
    assert not kept.any()


def test_an_encoder_chooses_no_tokens(path: Path) -> None:
    program = make(path).program
    assert Capability.ENCODER in program.capabilities
    with pytest.raises(EngineError, match="GREEDY"):
        program.step(make(path).plan({1: [5]}, [0]), Wants(greedy=True))


def test_one_without_classes_has_no_scores(tmp_path: Path) -> None:
    driver = make(make_encoder(tmp_path, "BertModel"))
    with pytest.raises(ValueError, match="no classes"):
        driver.program.step(driver.plan({1: [5]}, [0]), LOGITS)


def test_memory_grows_with_positions_and_blocks(path: Path) -> None:
    model = load(path)
    spec = model.spec
    assert isinstance(spec, EncoderSpec)
    few = encoder_need(spec, model.weights, torch.float32, block_size=16, num_threads=1)
    more = encoder_need(replace(spec, max_positions=8192), model.weights, torch.float32, block_size=32, num_threads=2)
    assert (few.kv_block_bytes, more.kv_block_bytes) == (128, 256)
    assert more.activations_bytes > 2 * few.activations_bytes
    assert few.weights_bytes == more.weights_bytes > 0
