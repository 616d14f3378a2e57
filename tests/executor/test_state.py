"""A model with recurrent states gives the same bits whatever happens to its sequences (decisions/0018)."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cloister.backends import BACKENDS
from cloister.backends.base import KVGroup, KVLayout
from cloister.backends.spec import GatedDeltaNetSpec, Mamba2Spec, ShortConvSpec, group_layers
from cloister.executor import ModelRunner
from cloister.kv import BlockGroup, BlockPool, PrefixKeys
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.events import Ended, Preempted, Scheduled
from cloister.types.request import BeamSearch, Request, SamplingParams
from cloister.types.scope import Scope, ScopeKind
from tests.driving import Driver, RandomWeights, make_spec
from tests.slow_grammars import MASK_S, SLOW, Watch, make_slow
from tests.thinning import thin
from tests.tree_history import Erratic, Prophet

VOCAB, BLOCK, MAX_MODEL_LEN = 64, 4, 400
MAMBA = Mamba2Spec(num_heads=4, head_dim=8, num_groups=2, d_state=8, kernel_size=4)
SHORT = ShortConvSpec(size=32, kernel_size=3)
BASE = make_spec(hidden=32, intermediate=48, heads=(4, 2), head_dim=8, num_layers=6, vocab=VOCAB)
ATTENTION = BASE.layers[0]
WINDOW = replace(ATTENTION, attention=replace(ATTENTION.attention, window=24))
HYBRID = replace(
    BASE,
    layers=(
        replace(ATTENTION, attention=None, state=MAMBA),
        ATTENTION,
        replace(ATTENTION, state=MAMBA),
        replace(ATTENTION, attention=None, state=SHORT, mlp=None),
        WINDOW,
        replace(ATTENTION, attention=None, state=None),
    ),
)
PURE = replace(BASE, layers=(replace(ATTENTION, attention=None, mlp=None, state=MAMBA),) * 2)
CONVOLUTION = replace(ATTENTION, attention=None, state=SHORT)
LONGER = replace(CONVOLUTION, state=ShortConvSpec(size=32, kernel_size=6, bias=True))
SHORTS = replace(BASE, layers=(CONVOLUTION, ATTENTION, LONGER, WINDOW, CONVOLUTION))
ODD = Mamba2Spec(num_heads=6, head_dim=5, num_groups=3, d_state=20, kernel_size=2, conv_bias=False, norm="before_gate")
MAMBAS = tuple(replace(CONVOLUTION, state=state) for state in (MAMBA, ODD, replace(MAMBA, norm=None, output_bias=True)))
NATIVE_HYBRID = replace(BASE, layers=(MAMBAS[0], ATTENTION, MAMBAS[1], CONVOLUTION, WINDOW, MAMBAS[2]))
GATED = replace(ATTENTION, attention=replace(ATTENTION.attention, gated=True))
NETS = tuple(replace(CONVOLUTION, state=net) for net in (GatedDeltaNetSpec(2, 4, 8, 8, 4), GatedDeltaNetSpec(1, 3, 20, 5, 2)))
DELTA_NETS = replace(BASE, layers=(NETS[0], GATED, NETS[1], MAMBAS[0], WINDOW, NETS[0]))
SPECS = {
    "hybrid": HYBRID, "pure": PURE, "native short convolutions": SHORTS, "native hybrid": NATIVE_HYBRID,
    "native, parts alone and side by side": HYBRID, "native, pure": PURE, "native delta nets": DELTA_NETS,
}  # fmt: skip
WEIGHTS = {name: RandomWeights(spec, 5) for name, spec in SPECS.items()}


def program(name, layout, num_threads=1):
    return BACKENDS.get("native" if name.startswith("native") else "torch")(
        num_threads=num_threads, device="cpu", dtype="float32"
    ).build(SPECS[name], WEIGHTS[name], layout)


class Served:
    """What came of some requests on one program."""

    def __init__(
        self, name, *, num_blocks=400, num_states=60, num_seqs=6, max_tokens=24, answers=(), chains=False, prefix_cache=True,
        num_threads=1, grammars=None, clock=None,
    ):  # fmt: skip
        groups = [
            KVGroup(num_states if group.is_state else num_blocks, group.layers, group.window, group.is_state)
            for group in group_layers(SPECS[name], MAX_MODEL_LEN)
        ]
        self.layout = KVLayout.of_groups(groups, BLOCK)
        self.program = program(name, self.layout, num_threads)
        held = -(-(24 + max_tokens) // BLOCK) + 1
        self.pool = BlockPool(
            [
                BlockGroup.of_state(g.num_blocks)
                if g.is_state
                else BlockGroup(g.num_blocks, g.window, held if g.window else None)
                for g in groups
            ],
            BLOCK,
        )
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=num_seqs,
            budget=BudgetConfig(max_tokens=max_tokens),
            prefix_cache=prefix_cache,
        )
        self.speculation = Erratic(most=7) if answers else None
        self.scheduler = Scheduler(config, self.pool, PrefixKeys("model", BLOCK), self.speculation)
        self.runner = ModelRunner(
            self.program,
            vocab_size=VOCAB,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            drafters={"prophet": Prophet(answers, VOCAB, chains=chains)} if answers else {},
            groups=groups,
            grammars=grammars,
            clock=clock,
        )
        self.num_preempted = self.num_hit = self.num_deferred = 0
        self.waits_s = []
        self._clock = clock

    def serve(self, requests):
        for request in requests:
            self.scheduler.add(request, 0.0)
        found, names = {}, {}
        for step in range(4000):
            plan = self.scheduler.plan(step * 0.01)
            if plan is None:
                break
            began_s = 0.0 if self._clock is None else self._clock.now_s
            result = self.runner.run(plan)
            self.waits_s.append(0.0 if self._clock is None else self._clock.now_s - began_s)
            self.num_deferred += len(result.deferred)
            result.elapsed_s = 0.01
            assert not result.failures
            for sample in result.samples:
                tokens, logprobs = found.setdefault(sample.seq_id, ([], []))
                tokens += sample.token_ids
                logprobs += sample.logprobs or []
            for event in self.scheduler.commit(result, {}, step * 0.01):
                if isinstance(event, Ended):
                    names[event.seq_id] = (event.request_id, event.index)
                    found[event.seq_id] = tuple(part[: event.num_output_tokens] for part in found.get(event.seq_id, ()))
                self.num_preempted += isinstance(event, Preempted)
                self.num_hit += event.num_cached_tokens if isinstance(event, Scheduled) else 0
            self.pool.check()
            self.scheduler.prefix_cache and self.scheduler.prefix_cache.check()
        assert not self.scheduler.requests
        return {name: found[seq_id] for seq_id, name in names.items()}


def wishes(name):
    """Every second request for torch, which computes ten times as long."""
    return [wish for wish in all_wishes() if name.startswith("native") or wish.request_id in ("1", "3", "4", "5")]


def all_wishes():
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB) for _ in range(70)]
    for i in range(8):
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))]
        sampling = SamplingParams(
            temperature=0.0 if i % 3 else 0.9,
            seed=i,
            n=3 if i == 4 else 1,
            max_tokens=rng.randrange(4, 40),
            ignore_eos=True,
            logprobs=2 if i % 4 == 1 else None,
        )
        scope = Scope(ScopeKind.LOCAL, b"a")
        yield Request(request_id=str(i), token_ids=(shared if i % 2 else []) + tail, sampling=sampling, scope=scope)


@pytest.fixture(scope="module", params=thin(SPECS, [name for name in SPECS if name != "pure"]))  # whose layers "hybrid" has
def name(request):
    return request.param


@pytest.fixture(scope="module")
def expected(name):
    """Answers of requests that run alone, each prompt in one chunk, without hits and drafts."""
    answers = {}
    for wish in wishes(name):
        answers |= Served(name, max_tokens=200, prefix_cache=False).serve([wish])
    return answers


def test_alone_is_what_a_loop_over_tokens_gives(name, expected):
    driver = Driver(program(name, KVLayout(200, BLOCK)), 200, BLOCK)
    wish = next(wish for wish in wishes(name) if wish.sampling.temperature == 0 and wish.sampling.n == 1)
    tokens = list(wish.token_ids)
    for token in tokens:
        logits = driver.step({"a": [token]})["a"][-1]
    answer = []
    while len(answer) < wish.sampling.max_tokens:
        answer.append(int(np.argmax(logits)))
        logits = driver.step({"a": answer[-1:]})["a"][-1]
    assert expected[wish.request_id, 0][0] == answer


@pytest.mark.parametrize("max_tokens", thin([7, 24, 64], 1))
def test_company_chunks_and_hits_change_no_bit(name, expected, max_tokens):
    served = Served(name, max_tokens=max_tokens)
    assert served.serve(wishes(name)) == expected
    hits = served.num_hit
    assert served.serve(wishes(name)) == expected
    assert served.num_hit > hits, "no prefix was found, so none was tried"


def test_threads_change_no_bit(name, expected, monkeypatch):
    monkeypatch.setattr("cloister.backends.torch.schedule.WORTH_SHARING", 0.0)
    assert Served(name, num_threads=2).serve(wishes(name)) == expected


@pytest.mark.parametrize(("num_blocks", "num_states"), [(44, 60), (400, 6)])
def test_preemption_changes_no_bit(name, expected, num_blocks, num_states):
    served = Served(name, num_blocks=num_blocks, num_states=num_states)
    assert served.serve(wishes(name)) == expected
    assert served.num_preempted or name.endswith("pure") or num_states == 6


@pytest.mark.parametrize("chains", [True, False])
def test_drafts_change_no_bit(name, expected, chains):
    answers = [[*wish.token_ids, *expected[wish.request_id, 0][0]] for wish in wishes(name)]
    served = Served(name, answers=answers, chains=chains)
    assert served.serve(wishes(name)) == expected
    assert served.speculation.num_accepted > (50 if name.startswith("native") else 20)
    assert served.speculation.num_accepted < served.speculation.num_drafted


def test_beams_find_the_same_answers(name):
    beams = SamplingParams(beams=BeamSearch(width=3), n=2, max_tokens=12, ignore_eos=True)
    requests = [Request(request_id=f"beams{i}", token_ids=[5 + i, 6, 7, 8, 9, 10], sampling=beams) for i in range(3)]

    def answers(served, requests):
        for request in requests:
            served.serve([request])
        return [answer.token_ids for answer in served.scheduler.take_answers()]

    alone = [answer for request in requests for answer in answers(Served(name, prefix_cache=False), [request])]
    assert len(alone) == 6
    served = Served(name)
    served.serve(wishes(name)[:3] + requests)
    assert sorted(answer.token_ids for answer in served.scheduler.take_answers()) == sorted(alone)


def guided_wishes(name):
    """Prompts that end at every place of a block, half of them with a beginning that is known, and some that fork."""
    rng = random.Random(4)
    shared = [rng.randrange(VOCAB) for _ in range(41)]
    for i in range(8 if name.startswith("native") else 4):
        tail = [rng.randrange(VOCAB) for _ in range(i)]
        sampling = SamplingParams(
            temperature=0.0 if i % 2 else 0.9,
            seed=i,
            n=3 if i % 4 == 1 else 1,
            max_tokens=8,
            min_tokens=8 * (i % 3 == 1),
            ignore_eos=True,
            logprobs=1 if i == 2 else None,
            grammar=SLOW,
        )
        yield Request(request_id=str(i), token_ids=shared + tail, sampling=sampling, scope=Scope(ScopeKind.LOCAL, b"a"))


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "num_states"), thin([(24, 400, 60), (200, 400, 60), (200, 44, 60), (24, 400, 12)], 2)
)
@pytest.mark.parametrize("drafts", [False, True])
def test_masks_that_take_long_hold_up_a_step_for_a_bounded_time_and_change_no_bit(
    name, max_tokens, num_blocks, num_states, drafts
):
    watch, requests, expected = Watch(), list(guided_wishes(name)), {}
    for request in requests:
        alone = Served(name, max_tokens=200, prefix_cache=False, grammars=make_slow(watch, VOCAB), clock=watch)
        expected |= alone.serve([request])
    answers = [[*request.token_ids, *expected[request.request_id, 0][0]] for request in requests] if drafts else ()
    served = Served(
        name, max_tokens=max_tokens, num_blocks=num_blocks, num_states=num_states, answers=answers,
        grammars=make_slow(watch, VOCAB), clock=watch,
    )  # fmt: skip
    for _ in range(2):  # the second time on states that were kept
        assert served.serve(requests) == expected
    assert served.num_hit
    assert served.num_deferred > 100
    assert drafts or max(served.waits_s) <= MASK_S + 1e-9


def test_scopes_share_no_state(name):
    served = Served(name)
    first = wishes(name)[0]
    served.serve([replace_scope(first, b"a")])
    served.serve([replace_scope(first, b"b")])
    assert not served.num_hit
    served.serve([replace_scope(first, b"a")])
    assert served.num_hit


def replace_scope(request, salt):
    return Request(
        request_id=request.request_id,
        token_ids=request.token_ids,
        sampling=request.sampling,
        scope=Scope(ScopeKind.LOCAL, salt),
    )


def test_states_are_wiped_when_nobody_holds_them(name):
    served = Served(name, prefix_cache=False, answers=[[1, 2, 3]])
    served.serve(wishes(name))
    plan = served.scheduler.plan(100.0)
    if plan is not None:
        served.runner.run(plan)
    served.runner.wipe_buffers()
    if name.startswith("native"):
        for number, layer in enumerate(SPECS[name].layers):
            for block in served.layout.state_blocks if layer.state else ():
                assert not any(served.program.read_block(number, block))
        return
    for states in served.program._states.cache.layers.values():
        assert not states.any()
    assert not served.program._states._kept
