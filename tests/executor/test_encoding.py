"""Runner, scheduler and a real encoder together: chunks, company and preemption change no bit, and nothing is generated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import KVLayout
from cloister.executor import ModelRunner
from cloister.executor.pooling import NO_TEXT, OF_ENCODERS
from cloister.kv import BlockPool, PrefixKeys
from cloister.models import load
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted
from cloister.types.request import FinishReason, PoolingParams, Request, SamplingParams
from tests.encoder_factory import make_encoder
from tests.executor.test_pooling import make_request
from tests.executor.test_pooling import serve as serve_decoder

BLOCK = 4
NOTHING = SamplingParams(max_tokens=0)
WAYS = [
    PoolingParams(kind="cls"),
    PoolingParams(kind="mean", dimensions=9),
    PoolingParams(kind="last", normalize=False),
    PoolingParams(kind="classify", normalize=False),
    PoolingParams(kind="classify", normalize=False, second_start=3),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder"), "BertForSequenceClassification", num_labels=3)


def requests(count: int = 20) -> list[Request]:
    found = []
    for number in range(count):
        token_ids = np.random.default_rng(number).integers(4, 320, 4 + 13 * number % 120).tolist()
        pooling = WAYS[number % len(WAYS)]
        found.append(Request(request_id=str(number), token_ids=token_ids, sampling=NOTHING, pooling=pooling, priority=-number))
    return found


def serve(
    path: Path, asked: list[Request], *, num_blocks: int = 800, max_tokens: int = 512, policy: str = "fcfs", at_once: int = 99
) -> tuple[dict[str, bytes], list[object]]:
    """Serves requests, `at_once` new ones a step; returns request id -> result, and every event."""
    model = load(path)
    backend = BACKENDS.get("torch")(num_threads=1, device="cpu", dtype="float32")
    program = backend.build(model.spec, model.weights, KVLayout(num_blocks, BLOCK))
    pool = BlockPool(num_blocks, BLOCK)
    config = SchedulerConfig(max_model_len=300, max_num_seqs=16, policy=policy, budget=BudgetConfig(max_tokens=max_tokens))
    scheduler = Scheduler(config, pool, PrefixKeys("model", BLOCK))
    runner = ModelRunner(program, vocab_size=320, max_model_len=300, block_size=BLOCK)
    waiting, found, events = list(asked), {}, []
    for step in range(2000):
        for request in waiting[:at_once]:
            scheduler.add(request, step * 0.01)
        del waiting[:at_once]
        plan = scheduler.plan(step * 0.01)
        events += scheduler.take_events()
        if plan is None:
            if not waiting and not scheduler.requests:
                break
            continue
        result = runner.run(plan)
        found |= {seq_id: vector.data for seq_id, vector in result.embeddings.items()}
        events += scheduler.commit(result, {}, step * 0.01)
        pool.check()
    assert not runner.num_sequences
    names = {event.seq_id: event.request_id for event in events if isinstance(event, Ended)}
    return {names[seq_id]: data for seq_id, data in found.items()}, events


@pytest.fixture(scope="module")
def alone(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for request in requests():
        found |= serve(path, [request])[0]
    return found


def test_results_have_their_sizes(alone: dict[str, bytes]) -> None:
    assert [len(alone[str(number)]) // 4 for number in range(5)] == [64, 9, 64, 3, 3]


@pytest.mark.parametrize(("num_blocks", "max_tokens", "at_once"), [(800, 512, 99), (800, 17, 3), (60, 40, 2)])
def test_company_and_chunks_change_no_bit(
    path: Path, alone: dict[str, bytes], num_blocks: int, max_tokens: int, at_once: int
) -> None:
    assert serve(path, requests(), num_blocks=num_blocks, max_tokens=max_tokens, at_once=at_once)[0] == alone


def test_a_text_that_was_preempted_is_computed_anew(path: Path, alone: dict[str, bytes]) -> None:
    found, events = serve(path, requests(), num_blocks=40, max_tokens=16, policy="priority", at_once=1)
    assert any(isinstance(event, Preempted) for event in events), "it must be tight enough"
    assert found == alone


def test_a_request_for_text_ends_with_an_error_and_others_go_on(path: Path, alone: dict[str, bytes]) -> None:
    text = Request(request_id="text", token_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=4))
    found, events = serve(path, [*requests(5), text])
    (ended,) = (event for event in events if isinstance(event, Ended) and event.request_id == "text")
    assert (ended.reason, ended.error) == (FinishReason.ERROR, NO_TEXT)
    assert found == {name: alone[name] for name in found}
    assert len(found) == 5


@pytest.mark.parametrize("kind", ["cls", "classify"])
def test_a_decoder_pools_by_no_way_of_encoders(kind: str) -> None:
    asked = [make_request(0, 9, PoolingParams(kind=kind)), make_request(1, 9, PoolingParams(kind="mean"))]
    vectors, events = serve_decoder(asked)
    errors = {event.request_id: event.error for event in events if isinstance(event, Ended)}
    assert errors == {"0": OF_ENCODERS, "1": None}
    assert list(vectors) == ["1"]
