"""The torch back end as an entry of the registry, its tiles and its threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout
from cloister.backends.torch import attention, backend, linear
from cloister.backends.torch.linear import Linear, cut_rows, measure_tiles, pad_rows
from cloister.backends.torch.schedule import Team
from cloister.types.errors import ConfigError
from tests.driving import RandomWeights, build, make_spec

SPEC = make_spec(hidden=64, intermediate=80, heads=(4, 2), head_dim=16)
CPU = torch.device("cpu")
MANY = 1e12
"""Operations that are worth sharing."""


@pytest.fixture
def only_the_reference_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where no tile but that of 32 rows, and no split but the whole one, gives the same bits."""
    caches = (linear.panel_tiles, attention.attention_tiles, attention.split_widths)
    for measured in caches:
        measured.cache_clear()
    monkeypatch.setattr(linear, "measure_tiles", lambda *_: (32,))
    monkeypatch.setattr(attention, "measure_tiles", lambda *_: (32,))
    monkeypatch.setattr(attention, "_WIDTHS", (256,))
    yield
    for measured in caches:
        measured.cache_clear()


def test_importing_the_back_ends_does_not_import_torch() -> None:
    code = "import sys, cloister.backends, cloister.models; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_the_registry_knows_torch_and_what_it_endangers() -> None:
    assert "torch" in BACKENDS.names()
    assert "wipe on free" in BACKENDS.threat("torch").mitigations[0]


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"dtype": "int3"}, {"num_threads": 0}])
def test_a_setting_that_does_not_exist_is_refused(wrong: dict[str, object]) -> None:
    settings = {"num_threads": 1, "device": "cpu", "dtype": "float32", **wrong}
    with pytest.raises(ConfigError):
        BACKENDS.get("torch")(**settings)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        BACKENDS.get("torch")(num_threads=1, device="cuda", dtype="float32")


@pytest.mark.parametrize("block_size", [0, 257])
def test_a_block_size_out_of_range_is_refused(block_size: int) -> None:
    backend = BACKENDS.get("torch")(num_threads=1, device="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="1 to 256"):
        backend.build(SPEC, RandomWeights(SPEC), KVLayout(4, block_size))


def test_the_fingerprint_tells_number_formats_apart() -> None:
    names = {
        BACKENDS.get("torch")(num_threads=threads, device="cpu", dtype=dtype).fingerprint
        for dtype in ("float32", "bfloat16")
        for threads in (1, 2)
    }
    assert len(names) == 2


def test_bfloat16_is_close_to_float32() -> None:
    tokens = list(range(100))
    exact, rounded = (build(SPEC, RandomWeights(SPEC), dtype=dtype).run("a", tokens) for dtype in ("float32", "bfloat16"))
    error = np.abs(exact - rounded)
    assert 1e-4 < error.max() < 0.3


def test_measured_tiles_and_widths_give_the_bits_of_the_reference(request: pytest.FixtureRequest) -> None:
    tokens = list(range(300))
    measured = build(SPEC, RandomWeights(SPEC)).run("a", tokens, 90)
    request.getfixturevalue("only_the_reference_tile")
    assert build(SPEC, RandomWeights(SPEC)).run("a", tokens, 90).tobytes() == measured.tobytes()


def test_a_tile_that_sums_in_another_order_is_not_used() -> None:
    weight = torch.randn(256, 64)

    def product(rows: Tensor) -> Tensor:
        if len(rows) < 16:  # a kernel for few rows that adds up two parts (halves are what MKL's AVX2 kernels add up anyway)
            return rows[:, :100] @ weight[:100] + rows[:, 100:] @ weight[100:]
        return rows @ weight

    tiles = measure_tiles(product, 256, torch.float32, CPU)
    assert 32 in tiles
    assert not {4, 8} & set(tiles)


@pytest.mark.parametrize("num_outputs", [1, 5, 7, 10, 11])
def test_a_product_with_few_outputs_gives_a_row_the_same_bits_at_every_place(num_outputs: int) -> None:
    linear = Linear(torch.randn(num_outputs, 256), None, Team(1))
    found = linear(torch.randn(1, 256).expand(32, 256).contiguous())
    assert found.shape == (32, num_outputs)
    assert torch.equal(found, found[:1].expand_as(found))


@pytest.mark.parametrize(("num_rows", "padded"), [(1, 8), (8, 8), (9, 16), (17, 32), (33, 64), (300, 320)])
def test_rows_are_padded_to_whole_tiles(num_rows: int, padded: int) -> None:
    tiles = (4, 8, 16, 32, 64, 128)
    assert pad_rows(num_rows, tiles) == padded
    cuts = cut_rows(padded, tiles)
    assert [start for start, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == padded
    assert all(end - start in tiles for start, end in cuts)
    assert pad_rows(num_rows, (32,)) == -(-num_rows // 32) * 32


def test_a_team_does_every_task_once_and_on_more_than_one_thread() -> None:
    done: list[tuple[int, int]] = []
    are_two = threading.Event()

    def task(number: int) -> None:
        done.append((number, threading.get_ident()))
        if len({thread for _, thread in done}) == 2:
            are_two.set()
        are_two.wait(300)

    Team(2).run([lambda number=number: task(number) for number in range(20)], MANY)  # type: ignore[misc]
    assert sorted(number for number, _ in done) == list(range(20))
    assert len({thread for _, thread in done}) == 2


def test_a_team_reports_a_failure_and_works_on() -> None:
    team, done = Team(2), []

    def fail() -> None:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        team.run([fail, fail, fail], MANY)
    team.run([lambda: done.append(1)] * 3, MANY)
    assert done == [1, 1, 1]


def test_a_team_may_be_asked_from_within_its_own_tasks() -> None:
    team, done = Team(2), []
    inner = [lambda: done.append(1)] * 4
    worker = threading.Thread(target=team.run, args=([lambda: team.run(inner, MANY)] * 5, MANY), daemon=True)
    worker.start()
    worker.join(300)
    assert len(done) == 20


@pytest.mark.parametrize(
    ("settings", "advice"),
    [
        ({"numerics": "quick"}, "exact or fast"),
        ({"numerics": "fast"}, "needs a CUDA device"),
        ({"numerics": "fast", "device": "cuda", "dtype": "float32"}, "bfloat16"),
        ({"numerics": "fast", "device": "cuda"}, "FlashInfer"),
        ({"device": "cuda", "missing": ("triton",)}, "cloister\\[gpu\\]"),
    ],
    ids=str,
)
def test_numerics_that_cannot_be_had_are_refused_with_what_to_do(
    settings: dict[str, Any], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = settings.pop("missing", ("flashinfer",))
    monkeypatch.setattr(backend, "find_spec", lambda name: None if name in missing else name)
    with pytest.raises(ConfigError, match=advice):
        backend.check_libraries(**{"device": "cpu", "dtype": "bfloat16", "numerics": "exact", **settings})


def test_a_bias_of_the_head_is_added_to_logits_before_they_are_scaled() -> None:
    spec = replace(SPEC, logit_scale=0.5)
    biased, tokens = replace(spec, head_bias=True), list(range(20))
    weights = RandomWeights(biased)
    difference = build(biased, weights).run("a", tokens) - build(spec, weights).run("a", tokens)
    assert np.abs(difference - 0.5 * weights.read("head.bias")).max() < 1e-5
