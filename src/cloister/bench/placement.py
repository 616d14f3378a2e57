"""Predicts in virtual time how well placements of replicas serve a workload (`cluster.virtual.placement`)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from cloister.bench.drive import drive_client, make_requests
from cloister.bench.measure import make_warmup
from cloister.bench.report import LatencyObjective, Summary, summarise
from cloister.bench.workloads import WorkItem, make_tokens
from cloister.cluster.virtual.byte_tokenizer import write_byte_tokenizer
from cloister.cluster.virtual.event_loop import run_virtually
from cloister.cluster.virtual.placement import ReplicaPlacement
from cloister.cluster.virtual.prediction import running_cluster
from cloister.text import Tokenizer

VOCAB_SIZE: Final = 256
"""Upper bound of token ids in prompts of a virtual cluster."""


def predict(
    placement: ReplicaPlacement,
    items: Sequence[WorkItem],
    objective: LatencyObjective,
    router: str,
    *,
    num_warmup: int = 2,
    seed: int = 0,
) -> Summary:
    """Runs a workload on a virtual cluster. Token ids of prompts must be below `VOCAB_SIZE`.

    Args:
        router: name of the router.
        num_warmup: earlier requests, from which the router learns step times.
        seed: seed of the router's random choices.
    """

    warm_up = [
        replace(item, prompt=make_tokens((9, number), item.num_input_tokens, VOCAB_SIZE))
        for number, item in enumerate(make_warmup(items, num_warmup))
    ]

    async def run(tokenizer: Tokenizer) -> Summary:
        async with running_cluster(placement.shape(router), tokenizer, seed) as cluster:
            await drive_client(cluster, make_requests(warm_up, "warm-up"))
            return summarise(placement.words, await drive_client(cluster, make_requests(items)), objective)

    with tempfile.TemporaryDirectory() as folder:
        return run_virtually(run(Tokenizer(write_byte_tokenizer(Path(folder)))))


def rank(predicted: Sequence[tuple[ReplicaPlacement, Summary]]) -> list[tuple[ReplicaPlacement, Summary]]:
    """Returns placements by descending goodput, rounded to 0.01 requests/s; ties go to the one whose requests end sooner."""

    def key(pair: tuple[ReplicaPlacement, Summary]) -> tuple[float, float]:
        summary = pair[1]
        return -round(summary.goodput_rps or 0.0, 2), summary.e2e.p99 if summary.e2e is not None else float("inf")

    return sorted(predicted, key=key)
