"""Layers with a window keep no more KV than their queries see, and no answer changes by it (decisions/0018)."""

import random
from dataclasses import replace

import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import KVGroup, KVLayout
from cloister.backends.kivi import KIVI, RECENT_WINDOW
from cloister.backends.spec import StreamsSpec, group_layers
from cloister.executor import ModelRunner
from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import Request, SamplingParams
from tests.driving import RandomWeights, make_spec
from tests.native import KERNELS
from tests.thinning import thin
from tests.tree_history import Erratic, Prophet

VOCAB, BLOCK, MAX_MODEL_LEN, MAX_TOKENS = 64, 4, 400, 24
BACKENDS_AND_KINDS = [
    ("torch", {}),
    *(
        ("native", {"kernels": KERNELS[place % len(KERNELS)], "dtype": ("float32", "bfloat16")[place % 2]})
        for place in range(max(2, len(KERNELS)))
    ),
    *(("native", {"dtype": "bfloat16", "kv_dtype": kind}) for kind in ("int8", "int4")),
]
"""Instruction sets and types in turns: what a step computes with them, `tests/backends` compares."""


def make_windows(*windows):
    base = make_spec(hidden=32, intermediate=48, heads=(4, 2), head_dim=8, num_layers=len(windows), vocab=VOCAB)
    layers = tuple(
        replace(layer, attention=replace(layer.attention, window=window))
        for layer, window in zip(base.layers, windows, strict=True)
    )
    return replace(base, layers=layers)


MIXED = make_windows(24, None, 24, 7, None)
ALL_WINDOWED = make_windows(24, 24)
SHARING = replace(
    MIXED,
    layers=(
        *MIXED.layers,
        *(
            replace(layer, attention=replace(layer.attention, shared_kv=number))
            for number, layer in enumerate(MIXED.layers)
            if number > 1
        ),
    ),
    streams=StreamsSpec(2, 0, laurel_rank=8, input_size=6, input_vocab=VOCAB),
)
"""Layers that read the KV of others, one in each group."""
SPECS = {"mixed": MIXED, "all windowed": ALL_WINDOWED, "sharing": SHARING}
WEIGHTS = {name: RandomWeights(spec, 5) for name, spec in SPECS.items()}


def wishes():
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(90)]
    for i in range(14):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        sampling = SamplingParams(
            temperature=0.0 if i % 3 else 0.9, seed=i, n=2 if i == 4 else 1, max_tokens=rng.randrange(4, 60), ignore_eos=True
        )
        yield Request(request_id=str(i), token_ids=(shared if i % 2 else []) + tail, sampling=sampling)


class Served:
    """What came of some requests on one program."""

    def __init__(self, name, backend, options, *, grouped, num_blocks, answers=(), num_seqs=6, block=BLOCK):
        spec, speculation = SPECS[name], Erratic(most=5) if answers else None
        drafters = {"prophet": Prophet(answers, VOCAB)} if answers else {}
        self._block, self._recent = block, RECENT_WINDOW if options.get("kv_dtype") == KIVI else 0
        groups = self._groups(spec, num_blocks) if grouped else (KVGroup(num_blocks),)
        self.layout = KVLayout.of_groups(groups, block)
        maker = BACKENDS.get(backend)(num_threads=1, device="cpu", **{"dtype": "float32", **options})
        program = maker.build(spec, WEIGHTS[name], self.layout)
        self.pool = BlockPool([BlockGroup(g.num_blocks, g.window, self._held(g.window)) for g in groups], block)
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=num_seqs, budget=BudgetConfig(max_tokens=MAX_TOKENS))
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", block), speculation)
        self.runner = ModelRunner(
            program, vocab_size=VOCAB, max_model_len=MAX_MODEL_LEN, block_size=block, drafters=drafters, groups=groups
        )
        self.speculation = speculation
        self.num_preempted = self.num_hit = self.most_used = 0

    def _held(self, window):
        return None if window is None else -(-(window + MAX_TOKENS) // self._block) + 1

    def _groups(self, spec, num_blocks):
        return tuple(
            KVGroup(
                num_blocks if group.window is None else min(num_blocks, 3 * self._held(group.window)),
                group.layers,
                group.window,
                is_recent=group.is_recent,
            )
            for group in group_layers(spec, MAX_MODEL_LEN, self._recent)
        )

    def serve(self, requests):
        for request in requests:
            self.scheduler.add(request, 0.0)
        tokens, names = {}, {}
        for step in range(4000):
            plan = self.scheduler.plan(step * 0.01)
            if plan is None:
                break
            result = self.runner.run(plan)
            result.elapsed_s = 0.01
            assert not result.failures
            for sample in result.samples:
                tokens.setdefault(sample.seq_id, []).extend(sample.token_ids)
            for event in self.scheduler.commit(result, {}, step * 0.01):
                if isinstance(event, Ended):
                    names[event.seq_id] = (event.request_id, event.index)
                    tokens[event.seq_id] = tokens[event.seq_id][: event.num_output_tokens]
                self.num_preempted += isinstance(event, Preempted)
                self.num_hit += event.num_cached_tokens if isinstance(event, Scheduled) else 0
            self.pool.check()
            self.most_used = max(self.most_used, self.pool.num_used)
        assert not self.scheduler.requests
        return {name: tokens[seq_id] for seq_id, name in names.items()}


@pytest.mark.parametrize(
    ("backend", "options", "name"),
    [
        pytest.param("torch", {}, "mixed", marks=pytest.mark.slow),  # likewise
        *thin(((*kind, "mixed") for kind in BACKENDS_AND_KINDS[1:]), 5),
        ("torch", {}, "all windowed"),
        pytest.param("torch", {}, "sharing", marks=pytest.mark.slow),  # which native kernels compute in a tenth of the time
        *(("native", {"dtype": "float32"}, name) for name in SPECS if name != "mixed"),
    ],
)
def test_answers_are_those_of_a_cache_that_keeps_everything(backend, options, name):
    whole = Served(name, backend, options, grouped=False, num_blocks=600)
    expected = whole.serve(wishes())
    for num_blocks in (90,) if backend == "torch" else (600, 90):  # which computes ten times as long
        windowed = Served(name, backend, options, grouped=True, num_blocks=num_blocks)
        assert windowed.serve(wishes()) == expected
        assert windowed.num_hit, "no prefix was found, so none was tried"
        assert bool(windowed.num_preempted) == (num_blocks == 90 and name != "all windowed")


@pytest.mark.parametrize(
    ("backend", "options", "name"),
    [
        *(pytest.param("torch", {}, name, marks=pytest.mark.slow) for name in SPECS),
        *((*BACKENDS_AND_KINDS[-1], name) for name in SPECS),
    ],
)
def test_answers_are_the_same_with_drafts(backend, options, name):
    expected = Served(name, backend, options, grouped=False, num_blocks=600).serve(wishes())
    answers = [[*wish.token_ids, *expected[wish.request_id, 0]] for wish in wishes()]
    drafting = Served(name, backend, options, grouped=True, num_blocks=200, answers=answers)
    assert drafting.serve(wishes()) == expected
    assert drafting.speculation.num_accepted > 50


PACKED = {"block": 32, "grouped": True}
ALONE = {**PACKED, "num_blocks": 80}


@pytest.mark.parametrize(
    ("backend", "options", "name"),
    [
        pytest.param("torch", {"kv_dtype": KIVI}, "all windowed", marks=pytest.mark.slow),  # tests/backends has it
        *(("native", {"dtype": "bfloat16", "kv_dtype": KIVI}, name) for name in SPECS),
    ],
)
def test_packed_answers_are_those_of_each_request_alone(backend, options, name):
    expected = {}
    for wish in wishes():
        expected |= Served(name, backend, options, **ALONE).serve([wish])
    for num_blocks in (80, 7):
        served = Served(name, backend, options, **PACKED, num_blocks=num_blocks)
        assert served.serve(wishes()) == expected
        assert served.num_hit, "no prefix was found, so none was tried"
        assert bool(served.num_preempted) == (num_blocks == 7 and name != "all windowed")
    answers = [[*wish.token_ids, *expected[wish.request_id, 0]] for wish in wishes()]
    drafting = Served(name, backend, options, **PACKED, num_blocks=80, answers=answers)
    assert drafting.serve(wishes()) == expected
    assert drafting.speculation.num_accepted > 50


def test_packing_changes_answers():
    options = {"dtype": "bfloat16"}
    packed, whole = (
        Served("mixed", "native", {**options, "kv_dtype": kv_dtype}, **PACKED, num_blocks=80).serve(wishes())
        for kv_dtype in (KIVI, "bfloat16")
    )
    assert packed != whole


def test_a_long_sequence_holds_what_its_windows_see():
    served = Served("mixed", "native", {}, grouped=True, num_blocks=100, num_seqs=1)
    request = Request(request_id="long", token_ids=[3] * 200, sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    served.serve([request])
    held = {group.window: -(-(group.window + MAX_TOKENS) // BLOCK) + 1 for group in served.pool.groups if group.window}
    assert served.most_used <= 75 + sum(held.values())
    kept_whole = Served("mixed", "native", {}, grouped=False, num_blocks=100, num_seqs=1)
    kept_whole.serve([request])
    assert kept_whole.most_used == 75


def test_what_is_behind_a_window_may_be_overwritten_by_anybody():
    served = Served("mixed", "torch", {}, grouped=True, num_blocks=100)
    assert [group.window for group in served.layout.groups] == [None, 24, 7]
    assert [len(served.layout.blocks_of(layer)) for layer in range(5)] == [39, 100, 39, 27, 100]
