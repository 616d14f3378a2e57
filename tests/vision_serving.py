"""Requests with pictures, through scheduler and runner, on a small model with a vision tower."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import FloatArray, KVGroup, KVLayout
from cloister.backends.spec import group_layers
from cloister.executor import ModelRunner
from cloister.executor.image_encoding import ImageEncoding
from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.models import load
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.images import ImageTile
from cloister.types.request import Request, SamplingParams, TokenLogprobs
from cloister.types.scope import LOCAL_SCOPE, Scope
from cloister.types.step import StepPlan
from tests.thinning import thin
from tests.tree_history import Erratic, Prophet
from tests.vision_factory import VOCAB

PLACEHOLDER = VOCAB - 1
MAX_MODEL_LEN = 400
ON_NATIVE_KERNELS = pytest.mark.parametrize("make", thin(["torch", "native"], ["native"]), indirect=True)
"""For tests of what scheduler and runner do on any back end: torch computes three times as long."""


def place_tiles(
    tokens: Sequence[int],
    tiles: Sequence[bytes],
    places: Sequence[int],
    num_tokens: int | None = None,
    grids: Sequence[tuple[int, int] | None] = (),
    *,
    bidirectional: bool = False,
) -> tuple[list[int], tuple[ImageTile, ...]]:
    """Returns a prompt with placeholders before the tokens of some numbers, and the tiles that stand there.

    Args:
        num_tokens: positions of each tile, unless it has a grid.
        grids: of the tiles, where they differ in size.
        bidirectional: positions of a tile see each other.
    """
    prompt: list[int] = []
    images = []
    starts = dict(zip(places, zip(tiles, grids or [None] * len(tiles), strict=True), strict=True))
    for number, token in enumerate(tokens):
        if number in starts:
            pixels, grid = starts[number]
            count = num_tokens or 0 if grid is None else grid[0] * grid[1]
            digest = hashlib.sha256(repr(grid).encode() + pixels).digest()
            images.append(
                ImageTile(
                    offset=len(prompt),
                    num_tokens=count,
                    digest=digest,
                    pixels=pixels,
                    grid=grid,
                    bidirectional=bidirectional,
                )
            )
            prompt += [PLACEHOLDER] * count
        prompt.append(token)
    return prompt, tuple(images)


class Served:
    """A scheduler and a runner on a back end, in float32.

    Attributes:
        program: what the runner computes with.
        num_hit, num_preempted: prompt tokens found in the prefix cache, and preemptions, so far.
        encoded: how many images were being encoded when each began, itself among them.

    Args:
        target_s: what a step may take, as the scheduler predicts it.
        answers: prompts with their answers, which are drafted beside wrong tokens, in trees; nothing is drafted without them.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunk: int = 64,
        num_blocks: int = 200,
        block_size: int = 8,
        num_threads: int = 1,
        num_seqs: int = 6,
        images_at_once: int = 3,
        answers: Sequence[Sequence[int]] = (),
        backend: str = "torch",
        target_s: float | None = None,
    ) -> None:
        model = load(path)
        maker = BACKENDS.get(backend)(num_threads=num_threads, device="cpu", dtype="float32")
        groups = [KVGroup(num_blocks, group.layers, group.window) for group in group_layers(model.spec, MAX_MODEL_LEN)]
        self.program = program = maker.build(model.spec, model.weights, KVLayout.of_groups(groups, block_size))
        held = [None if group.window is None else -(-(group.window + chunk) // block_size) + 1 for group in groups]
        self.pool = BlockPool(
            [BlockGroup(num_blocks, group.window, most) for group, most in zip(groups, held, strict=True)], block_size
        )
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_seqs,
            budget=BudgetConfig(max_tokens=chunk, target_s=target_s),
            num_images_at_once=images_at_once,
        )
        self.speculation = Erratic() if answers else None
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", block_size), self.speculation)
        self.runner = ModelRunner(
            program,
            vocab_size=VOCAB,
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            drafters={"prophet": Prophet(answers, VOCAB)} if answers else {},
            groups=groups,
            vision=model.spec.vision,
            num_images_at_once=images_at_once,
        )
        self.num_hit = self.num_preempted = 0
        self.failures: list[str] = []
        self.encoded: list[int] = []
        encode, lock, running = program.encode_image, threading.Lock(), [0]

        def count(image: ImageTile, check: Callable[[], None]) -> FloatArray:
            with lock:
                running[0] += 1
                self.encoded.append(running[0])
            try:
                return encode(image, check)
            finally:
                with lock:
                    running[0] -= 1

        self.runner.encoding = ImageEncoding(count, images_at_once)
        self._now_s = 0.0

    def plan(self, now_s: float = 0.0) -> StepPlan | None:
        """Returns the next plan, once all images that began are encoded; None when there is nothing left to do."""
        give_up_s = time.monotonic() + 300
        while self.runner.encoding.num_running:
            assert time.monotonic() < give_up_s, "an image is not encoded"
            time.sleep(0.001)
        for image in self.runner.encoding.take():
            self.scheduler.note_encoded(image, now_s)
        return self.scheduler.plan(now_s)

    def serve(self, requests: Sequence[Request]) -> dict[tuple[str, int], list[int]]:
        """Returns the tokens of each sequence, by request and number."""
        for request in requests:
            self.scheduler.add(request, self._now_s)
        tokens: dict[int, list[int]] = {}
        names: dict[int, tuple[str, int]] = {}
        while (plan := self.plan(self._now_s)) is not None:
            result = self.runner.run(plan)
            result.elapsed_s = 0.01
            self.failures += result.failures.values()
            for sample in result.samples:
                tokens.setdefault(sample.seq_id, []).extend(sample.token_ids)
            self._now_s += 0.01
            for event in self.scheduler.commit(result, {}, self._now_s):
                if isinstance(event, Ended):
                    names[event.seq_id] = (event.request_id, event.index)
                self.num_preempted += isinstance(event, Preempted)
                self.num_hit += event.num_cached_tokens if isinstance(event, Scheduled) else 0
            self.pool.check()
        return {name: tokens.get(seq_id, []) for seq_id, name in names.items()}


def make_request(
    name: str,
    prompt: Sequence[int],
    images: tuple[ImageTile, ...],
    *,
    max_tokens: int = 12,
    n: int = 1,
    scope: Scope = LOCAL_SCOPE,
    temperature: float = 0.0,
) -> Request:
    """Returns a request that ends with its length, and whose answer has no placeholder, which transformers would fill."""
    sampling = SamplingParams(
        temperature=temperature, seed=3, n=n, max_tokens=max_tokens, ignore_eos=True, logit_bias={PLACEHOLDER: -100.0}
    )
    return Request(request_id=name, token_ids=list(prompt), images=images, sampling=sampling, scope=scope)


def serve_one(served: Served, prompt: Sequence[int], images: tuple[ImageTile, ...], *, max_tokens: int = 12) -> list[int]:
    """Returns the greedy answer to one prompt."""
    return served.serve([make_request("one", prompt, images, max_tokens=max_tokens)])["one", 0]


def score(served: Served, prompt: Sequence[int], images: tuple[ImageTile, ...]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of every token of a prompt but the first, and the two most likely ones at its place."""
    request = make_request("scored", prompt, images, max_tokens=1)
    request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=2))
    served.scheduler.add(request, 0.0)
    found: list[TokenLogprobs] = []
    while (plan := served.plan()) is not None:
        result = served.runner.run(plan)
        found += [entry for entries in result.prompt_logprobs.values() for entry in entries]
        served.scheduler.commit(result, {}, 0.0)
    return found
