"""Prompts that are computed layer by layer, by the real scheduler, runner and back ends: the same bits in a fraction of the
memory, beside others, and whatever happens to them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cloister.backends import BACKENDS
from cloister.backends.availability import why_no_kernels
from cloister.backends.base import LOGITS, Capability, ForwardBatch, KVGroup, KVLayout
from cloister.executor import ModelRunner
from cloister.kv import BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.errors import EngineError
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import FinishReason, PoolingParams, Request, SamplingParams
from tests.adapter_factory import random_adapter
from tests.driving import RandomWeights, make_spec
from tests.slow_grammars import SLOW, HurriedWatch, make_slow

NATIVE = ["native"] if why_no_kernels() is None else []
SPEC = make_spec(hidden=48, intermediate=64, heads=(4, 2), head_dim=16, num_layers=12, vocab=128)
SIZE = 8
DRAW = random.Random(3)
LONG = [DRAW.randrange(128) for _ in range(400)]
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, logprobs=3, ignore_eos=True)
SCORES = SamplingParams(max_tokens=0, prompt_logprobs=2)
MEAN = PoolingParams(kind="mean")


class Engine:
    """Scheduler, runner and program.

    Attributes:
        found: by request id, what it got: samples, log-probabilities of its prompt by position, its vector.
    """

    def __init__(
        self, backend: str, num_blocks: int, longest: int = 0, *, max_tokens: int = 64, max_len: int = 1024, grammars=None,
        clock=None, **options,
    ):  # fmt: skip
        maker = BACKENDS.get(backend)(num_threads=1, device="cpu", **{"dtype": "float32", **options})
        self.program = maker.build(SPEC, RandomWeights(SPEC), KVLayout(num_blocks, SIZE))
        self.adapters: dict[str, int] = {}
        self.runner = ModelRunner(
            self.program, vocab_size=128, max_model_len=max(max_len, longest), block_size=SIZE, adapters=self.adapters,
            grammars=grammars, clock=clock,
        )  # fmt: skip
        config = SchedulerConfig(
            max_model_len=max_len, max_num_seqs=8, budget=BudgetConfig(max_tokens), max_prefill_only_len=longest
        )
        cells = self.program.cells if longest else None
        self.scheduler = Scheduler(config, BlockPool(num_blocks, SIZE), PrefixKeys("model", SIZE), cells=cells)
        self.found: dict[str, list[object]] = {}
        self.events: list[object] = []
        self.deferred: list[str] = []
        self.now = 0.0

    def add(self, name: str, tokens: list[int], sampling=ONE_TOKEN, pooling=None, adapter=None):
        request = Request(request_id=name, token_ids=tokens, sampling=sampling, pooling=pooling, adapter=adapter, timeout_s=1e9)
        self.scheduler.add(request, self.now)
        self.found[name] = []

    def step(self) -> bool:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            self.events += self.scheduler.take_events()
            return False
        names = {sequence.seq_id: name for name, state in self.scheduler.requests.items() for sequence in state.sequences}
        result = self.runner.run(plan)
        self.deferred += [names[seq_id] for seq_id in sorted(result.deferred)]
        starts = {part.seq_id: part.start if part.layerwise is None else part.layerwise.first_of_last_layer(part.start)
                  for part in plan.sequences}  # fmt: skip
        for sample in result.samples:
            self.found[names[sample.seq_id]].append((sample.token_ids, sample.logprobs))
        for seq_id, entries in result.prompt_logprobs.items():
            self.found[names[seq_id]] += [(starts[seq_id] + 1 + i, entry) for i, entry in enumerate(entries)]
        for seq_id, embedding in result.embeddings.items():
            self.found[names[seq_id]].append(embedding.data)
        self.now += 0.01
        self.events += self.scheduler.commit(result, {}, self.now)
        return True

    def run(self) -> None:
        while self.step():
            pass
        self.scheduler.pool.check()
        assert self.scheduler.pool.num_used == 0

    def ends(self) -> dict[str, FinishReason]:
        return {event.request_id: event.reason for event in self.events if isinstance(event, Ended)}

    def answer(self, tokens: list[int], sampling=ONE_TOKEN, pooling=None, adapter=None) -> list[object]:
        """What one request gets."""
        self.add("one", tokens, sampling, pooling, adapter)
        self.run()
        assert self.ends()["one"] in (FinishReason.LENGTH, FinishReason.STOP), self.events
        return self.found["one"]


KINDS = {"one token": (ONE_TOKEN, None), "scores": (SCORES, None), "mean": (SamplingParams(max_tokens=0), MEAN),
         "last": (SamplingParams(max_tokens=0), PoolingParams())}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "kind"), [("torch", "one token"), ("torch", "scores"), *((native, kind) for native in NATIVE for kind in KINDS)]
)
def test_a_prompt_of_five_times_the_memory_has_the_bits_of_the_plain_path(backend, kind):
    sampling, pooling = KINDS[kind]
    plain = Engine(backend, 100).answer(LONG, sampling, pooling)
    small = Engine(backend, 9, longest=400, max_len=72)
    assert len(LONG) > 5 * 9 * SIZE
    assert plain
    assert small.answer(LONG, sampling, pooling) == plain


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4"])
@pytest.mark.parametrize("backend", NATIVE)
def test_bits_are_the_same_in_every_kv_format(backend, kv_dtype):
    plain = Engine(backend, 100, kv_dtype=kv_dtype, dtype="bfloat16").answer(LONG)
    assert Engine(backend, 30, longest=400, max_len=72, kv_dtype=kv_dtype, dtype="bfloat16").answer(LONG) == plain


@pytest.mark.parametrize("max_tokens", [3, 64, 1000])
@pytest.mark.parametrize("backend", NATIVE)
def test_bits_are_the_same_whatever_a_step_holds(backend, max_tokens):
    prompt = LONG[:150] if max_tokens == 3 else LONG
    plain = Engine(backend, 100).answer(prompt, SCORES)
    assert Engine(backend, 9, longest=400, max_len=72, max_tokens=max_tokens).answer(prompt, SCORES) == plain


@pytest.mark.parametrize("backend", NATIVE)
def test_an_adapter_counts_in_every_layer(backend):
    answers = []
    for engine in (Engine(backend, 100), Engine(backend, 9, longest=400, max_len=72)):
        engine.program.load_adapter(2, random_adapter(SPEC, 4, size=0.5))
        engine.adapters["own"] = 2
        answers.append(engine.answer(LONG, adapter="own"))
    assert answers[0] == answers[1]
    assert answers[0] != Engine(backend, 100).answer(LONG)


@pytest.mark.parametrize("backend", NATIVE)
def test_others_decode_beside_it_at_every_step_with_the_bits_they_have_alone(backend):
    stream = SamplingParams(max_tokens=60, temperature=0, logprobs=1, ignore_eos=True)
    alone = Engine(backend, 100)
    alone.add("stream", LONG[:20], stream)
    alone.run()
    engine = Engine(backend, 40, longest=400, max_len=128, max_tokens=20)
    engine.add("stream", LONG[:20], stream)
    engine.step()
    engine.add("long", LONG)
    gaps = []
    while "long" not in engine.ends():
        before = len(engine.found["stream"])
        engine.step()
        gaps.append(len(engine.found["stream"]) - before)
    assert len(gaps) >= 400 / 20
    assert all(gaps), "a step without a token of the stream"
    engine.run()
    assert engine.found["stream"] == alone.found["stream"]
    assert engine.found["long"] == Engine(backend, 100).answer(LONG)


@pytest.mark.parametrize("backend", ["torch", *NATIVE])
def test_a_prefix_that_is_cached_is_not_computed_again_and_bits_stay(backend):
    engine = Engine(backend, 16, longest=400, max_len=72)
    engine.add("short", LONG[:60])
    engine.run()
    assert engine.answer(LONG) == Engine(backend, 100).answer(LONG)
    (start,) = [event for event in engine.events if isinstance(event, Scheduled) and event.request_id == "one"]
    assert start.num_cached_tokens == 56


@pytest.mark.parametrize("backend", NATIVE)
def test_the_start_of_a_prompt_is_kept_for_the_next_one_as_far_as_memory_is_idle(backend):
    engine = Engine(backend, 30, longest=400, max_len=72)
    engine.answer(LONG)
    other = [*LONG[:350], *LONG[:45]]
    engine.add("next", other)
    engine.run()
    (start,) = [event for event in engine.events if isinstance(event, Scheduled) and event.request_id == "next"]
    assert start.num_cached_tokens >= 5 * SIZE
    assert engine.found["next"] == Engine(backend, 100).answer(other)


@pytest.mark.parametrize("backend", NATIVE)
def test_hits_that_would_leave_no_memory_for_the_rest_are_computed_again(backend):
    engine = Engine(backend, 9, longest=400, max_len=72)
    engine.add("short", LONG[:60])  # it fills 8 blocks of 9
    engine.run()
    assert engine.answer(LONG) == Engine(backend, 100).answer(LONG)


@pytest.mark.parametrize("backend", NATIVE)
def test_a_preempted_prompt_begins_anew(backend):
    engine = Engine(backend, 12, longest=400, max_len=72, max_tokens=16)
    engine.add("stream", LONG[:8], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    engine.step()
    engine.add("long", LONG)
    engine.run()
    assert [event.request_id for event in engine.events if isinstance(event, Preempted)], "the test must be tight enough"
    assert engine.found["long"] == Engine(backend, 100).answer(LONG)


@pytest.mark.parametrize("num_more", [0, 1, 6, 7])
@pytest.mark.parametrize("scores", [None, 1])
@pytest.mark.parametrize("backend", NATIVE)
def test_a_mask_that_is_late_delays_a_prompt_of_one_layer_at_a_time_and_changes_no_bit(backend, num_more, scores):
    watch = HurriedWatch()
    prompt = LONG[: 392 + num_more]
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=3, prompt_logprobs=scores, min_tokens=1, grammar=SLOW)
    stream = SamplingParams(max_tokens=90, temperature=0, min_tokens=90, ignore_eos=True, grammar=SLOW)
    plain = Engine(backend, 100, grammars=make_slow(watch, 128), clock=watch).answer(prompt, one)
    engine = Engine(backend, 60, longest=400, max_len=128, max_tokens=20, grammars=make_slow(watch, 128), clock=watch)
    for name in ("stream", "other"):
        engine.add(name, LONG[:20], stream)
    engine.step()
    engine.add("one", prompt, one)
    engine.run()
    assert in_order(engine.found["one"]) == in_order(plain)
    assert engine.deferred.count("one") > 5 if scores is None else "one" not in engine.deferred


def in_order(found):
    """What a request got, scores first: in which order a step has them is not what is compared."""
    return sorted(found, key=lambda entry: (isinstance(entry[0], list), entry[0]))


@pytest.mark.parametrize("backend", NATIVE)
def test_a_prompt_of_which_little_is_new_waits_for_its_mask(backend):
    watch = HurriedWatch()
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=3, min_tokens=1, grammar=SLOW)
    stream = SamplingParams(max_tokens=60, temperature=0, min_tokens=60, ignore_eos=True, grammar=SLOW)
    prompt = LONG[:74]
    plain = Engine(backend, 100, grammars=make_slow(watch, 128), clock=watch).answer(prompt, one)
    engine = Engine(backend, 40, longest=400, max_len=72, grammars=make_slow(watch, 128), clock=watch)
    engine.add("short", LONG[:70])
    engine.run()
    engine.add("stream", LONG[100:110], stream)
    engine.step()
    engine.add("one", prompt, one)
    engine.run()
    (start,) = [event for event in engine.events if isinstance(event, Scheduled) and event.request_id == "one"]
    assert start.num_cached_tokens > len(prompt) - len(SPEC.layers), "as many positions as layers are computed, or more"
    assert engine.found["one"] == plain
    assert "one" not in engine.deferred


@pytest.mark.parametrize("backend", NATIVE)
def test_an_aborted_prompt_leaves_nothing_in_its_cells(backend):
    engine = Engine(backend, 9, longest=400, max_len=72)
    engine.add("long", LONG)
    for _ in range(5):
        engine.step()
    assert any(map(any, engine.program.export_blocks(range(9))))
    engine.scheduler.abort("long", engine.now)
    engine.run()
    assert not any(map(any, engine.program.export_blocks(range(9)))), "its KV or residuals are still there"


def test_what_must_go_on_behind_its_prompt_is_refused_with_the_figure():
    engine = Engine("torch", 9, longest=400, max_len=72)
    engine.add("chat", LONG, SamplingParams(max_tokens=2))
    engine.add("two", LONG, SamplingParams(max_tokens=1, n=2))
    engine.add("longer", [*LONG, 1])
    errors = {event.request_id: event.error for event in engine.scheduler.take_events() if isinstance(event, Ended)}
    assert "72" in errors["chat"]
    assert "72" in errors["two"]
    assert "401" in errors["longer"]


def test_a_prompt_that_fits_is_computed_as_ever():
    engine = Engine("torch", 9, longest=400, max_len=72)
    engine.add("short", LONG[:60])
    plan = engine.scheduler.plan(0.0)
    assert plan is not None
    assert [part.layerwise for part in plan.sequences] == [None]


@pytest.mark.parametrize("backend", ["torch", *NATIVE])
def test_wrong_steps_of_one_layer_are_refused(backend):
    program = Engine(backend, 18).program
    tokens = np.zeros(4, np.int32)

    def step(layer, table, rows=(), program=program):
        batch = ForwardBatch(
            token_ids=tokens, positions=np.arange(4, dtype=np.int32), query_starts=np.array([0, 4], np.int32),
            context_lens=np.array([4], np.int32), block_tables=np.array([[table]], np.int32),
            logit_rows=np.array(rows, np.int32), residual=np.zeros((4, 48), np.float32), layer=layer,
        )  # fmt: skip
        return program.step(batch, LOGITS)

    assert step(0, 18 * 12 - 1).logits.shape == (0, 128)
    for wrong in ((12, 0), (-1, 0), (0, 0, (1,))):
        with pytest.raises(ValueError, match="layer"):
            step(*wrong)
    if backend == "native":
        with pytest.raises(ValueError, match="block"):
            step(0, 18 * 12)


@pytest.mark.parametrize("backend", ["torch", *NATIVE])
def test_a_model_whose_layers_differ_says_that_it_has_no_cells(backend):
    spec = make_spec(hidden=48, intermediate=64, heads=(4, 2), head_dim=16, window=16)
    layout = KVLayout.of_groups([KVGroup(20, frozenset((0, 1)), 16)], SIZE)
    program = BACKENDS.get(backend)(num_threads=1, device="cpu", dtype="float32").build(spec, RandomWeights(spec), layout)
    assert program.cells is None
    assert Capability.LAYERWISE not in program.capabilities
    with pytest.raises(EngineError, match="LAYERWISE"):
        program.read_cells(np.zeros(1, np.int32))
