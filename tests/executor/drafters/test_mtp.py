"""A layer that predicts further tokens drafts what the equations say it predicts, however its sequences were computed, and the
drafts leave answers as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloister.backends.availability import why_no_kernels
from cloister.executor.drafters import DRAFTERS, Draft, DraftRequest
from cloister.executor.drafters.mtp import MtpDrafter
from cloister.executor.grammar import DRAFT_MASKS_S
from cloister.launch.engine import build_engine
from cloister.launch.settings import resolve_settings
from cloister.models.safetensors import write_tensors
from cloister.types.errors import CloisterError
from cloister.types.request import Request, SamplingParams
from cloister.types.step import StepPlan, StepResult
from tests.equality import ask as answer
from tests.equality import differing as differing_answers
from tests.model_factory import make_model
from tests.mtp_layers import FILE, FloatArray, add_layer, load_tensors, reference_predictions
from tests.slow_grammars import MASK_S, SLOW, Watch, make_slow
from tests.speculating import Replica
from tests.thinning import thin

BACKEND_NAMES = ["torch", *([] if why_no_kernels() else ["native"])]
NUM_DRAFTS = 3
SEEDS = range(100)


Drafted = list[tuple[list[int], list[int]]]
"""What sequences knew, and what was drafted for them."""


def watch(drafter: MtpDrafter) -> Drafted:
    """Returns what is drafted from now on."""
    found: Drafted = []
    draft = drafter.draft

    def keep(requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = draft(requests)
        pairs = zip(requests, drafts, strict=True)
        found.extend((request.state.tokens.tolist(), draft.token_ids) for request, draft in pairs)
        return drafts

    drafter.draft = keep  # type: ignore[method-assign]
    return found


class Watched(Replica):
    """A replica whose drafts are kept."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, DRAFTERS.get("mtp"), num_drafts=NUM_DRAFTS, max_num_seqs=4, **options)
        drafter = self.runner._drafting._drafters["tested"]
        assert isinstance(drafter, MtpDrafter)
        self.drafter, self.drafts = drafter, watch(drafter)


def ask(replica: Replica, prompts: Sequence[Sequence[int]], **sampling: Any) -> dict[tuple[str, int], list[int]]:
    wishes = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True, **sampling}
    requests = [
        Request(request_id=str(number), token_ids=list(prompt), sampling=SamplingParams(**wishes))
        for number, prompt in enumerate(prompts)
    ]
    return replica.serve(requests, SEEDS[: len(requests)])


def make_prompts(num_prompts: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(2, 320, length + number).tolist() for number in range(num_prompts)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, FloatArray]]:
    path = make_model(tmp_path_factory.mktemp("mtp"), "llama")
    return path, add_layer(path, seed=4)


def differing(model: tuple[Path, dict[str, FloatArray]], drafts: Drafted) -> list[int]:
    """Returns which drafts are not the tokens that the equations predict."""
    found = []
    for place, (known, drafted) in enumerate(drafts):
        _, logits = reference_predictions(*model, known, NUM_DRAFTS)
        if drafted != logits.argmax(-1).tolist()[: len(drafted)]:
            found.append(place)
    return found


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_drafts_are_what_the_equations_predict_for_prompts_in_chunks(model: Any, backend: str) -> None:
    replica = Watched(model[0], backend=backend, max_tokens=7)
    answers = ask(replica, make_prompts(3, 18))
    assert answers == ask(Replica(model[0], backend=backend), make_prompts(3, 18))
    assert [len(drafted) for _, drafted in replica.drafts].count(NUM_DRAFTS) > 20
    assert differing(model, replica.drafts[::3]) == []


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_drafts_after_a_prefix_hit_are_those_without_one(model: Any, backend: str) -> None:
    (prompt,) = make_prompts(1, 21)
    replica = Watched(model[0], backend=backend, prefix_cache=True)
    first = ask(replica, [prompt])
    num_first = len(replica.drafts)
    assert ask(replica, [prompt]) == first
    assert replica.scheduler.prefix_cache is not None
    assert replica.drafts[num_first:] == replica.drafts[:num_first]
    assert differing(model, replica.drafts[:2]) == []


def test_blocks_of_a_request_that_never_drafted_are_full_for_the_next_one(model: Any) -> None:
    (prompt,) = make_prompts(1, 21)
    replica = Watched(model[0], prefix_cache=True)
    ask(replica, [prompt], max_tokens=1)
    assert replica.drafts == []
    ask(replica, [prompt])
    assert all(drafted for _, drafted in replica.drafts)
    assert differing(model, replica.drafts) == []


def test_a_conversation_that_goes_on_drafts_from_its_first_turns_kv(model: Any) -> None:
    (prompt,) = make_prompts(1, 13)
    replica = Watched(model[0], prefix_cache=True)
    answer = ask(replica, [prompt])["0", 0]
    longer = [*prompt, *answer, 44, 45, 46]
    num_first = len(replica.drafts)
    ask(replica, [longer])
    assert differing(model, replica.drafts[num_first:][::2]) == []


def test_preempted_sequences_draft_as_if_nothing_had_been(model: Any) -> None:
    prompts = make_prompts(4, 20)
    replica = Watched(model[0], num_blocks=22, prefix_cache=True)
    assert ask(replica, prompts) == ask(Replica(model[0]), prompts)
    assert replica.num_preempted > 0
    assert differing(model, replica.drafts[::3]) == []


def test_forks_draft_each_from_its_own_text(model: Any) -> None:
    prompts = make_prompts(1, 18)
    wishes = {"n": 2, "temperature": 1.0, "seed": 5}
    replica = Watched(model[0], block_size=16, max_tokens=9)  # what the layer has not read when it forks is of earlier chunks
    assert ask(replica, prompts, **wishes) == ask(Replica(model[0]), prompts, **wishes)
    num_empty = sum(not drafted for _, drafted in replica.drafts)
    assert num_empty == 0
    assert len({tuple(known) for known, _ in replica.drafts}) > 10


def test_masks_that_take_long_hold_up_a_step_for_a_bounded_time_and_change_no_draft(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, took_s, num_left_out = Watch(), [], 0
    wishes = {"n": 2, "grammar": SLOW, "min_tokens": 14}
    expected = ask(Replica(model[0], grammars=make_slow(watch, 320)), make_prompts(2, 17), **wishes)
    replica = Watched(model[0], max_tokens=9, grammars=make_slow(watch, 320), clock=watch)
    run = replica.runner.run

    def timed(plan: StepPlan) -> StepResult:
        nonlocal num_left_out
        began_s = watch.now_s
        result = run(plan)
        took_s.append(watch.now_s - began_s)
        num_left_out += len(result.left_out)
        return result

    monkeypatch.setattr(replica.runner, "run", timed)
    assert ask(replica, make_prompts(2, 17), **wishes) == expected
    assert num_left_out > 10
    assert differing(model, replica.drafts[::3]) == []
    assert max(took_s) <= MASK_S + DRAFT_MASKS_S + MASK_S + 1e-9


def test_blocks_and_hidden_states_are_overwritten_when_requests_end(model: Any) -> None:
    replica = Watched(model[0])
    (program,) = replica.drafter._programs
    ask(replica, make_prompts(2, 18))
    assert any(any(program.read_block(0, block)) for block in range(64))  # type: ignore[attr-defined]
    plan = replica.scheduler.plan(100.0)
    assert plan is not None
    replica.runner.run(plan)
    assert not any(any(program.read_block(0, block)) for block in range(64))  # type: ignore[attr-defined]
    assert not replica.drafter._unread


def make_predictable(directory: Path) -> Path:
    """Writes a model whose blocks add nothing, so that a token decides the next one, and a layer that knows as much: what it
    merges is the embedding alone."""
    path = make_model(directory, "llama", tie_word_embeddings=False)
    tensors = load_tensors(path)
    idle = {name: 0 * tensors[name] for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))}
    tensors |= idle
    hidden = tensors["model.norm.weight"].size
    write_tensors(path / FILE, tensors)
    prefix = "model.layers.2."
    still = {f"{prefix}{name[15:]}": values for name, values in idle.items() if name.startswith("model.layers.1.")}
    add_layer(
        path,
        tensors={
            **still,
            f"{prefix}enorm.weight": np.ones(hidden, np.float32),
            f"{prefix}eh_proj.weight": np.eye(hidden, 2 * hidden, dtype=np.float32),
            f"{prefix}shared_head.norm.weight": tensors["model.norm.weight"],
        },
    )
    return path


@pytest.mark.parametrize("backend", BACKEND_NAMES)
def test_a_layer_that_knows_what_comes_next_is_accepted_whole(backend: str, tmp_path: Path) -> None:
    path = make_predictable(tmp_path)
    replica = Watched(path, backend=backend)
    assert ask(replica, make_prompts(2, 9), max_tokens=17) == ask(Replica(path), make_prompts(2, 9), max_tokens=17)
    assert replica.speculation.num_accepted == replica.speculation.num_drafted > 20


def open_core(path: Path, **settings: Any) -> Any:
    chosen = {"model": str(path), "max_model_len": 128, "num_threads": 1, "weights_cache": "", "kv_memory_mb": 1, **settings}
    return build_engine(resolve_settings(chosen, listens=False).engine.config)


def test_auto_finds_the_layer_and_its_memory_is_counted(model: Any) -> None:
    own, plain = (open_core(model[0], speculate=name) for name in ("mtp", "none"))
    assert open_core(model[0], speculate="auto").model.drafters == ("mtp", "ngram")
    assert own.model.drafters == ("mtp",)
    # the model has two layers, and the third one's KV lies in every block too
    assert own._scheduler.pool.num_total == pytest.approx(plain._scheduler.pool.num_total * 2 / 3, abs=1)


@pytest.mark.parametrize("family", thin(["deepseek_v3", "glm4_moe", "qwen3_next"], ["deepseek_v3", "qwen3_next"]))
def test_engines_of_families_that_have_such_layers_draft_what_the_equations_predict(family: str, tmp_path: Path) -> None:
    """In chunks, after prefix hits, and with preemption: latent attention, experts, and recurrent states beside them."""
    is_hybrid = family == "qwen3_next"
    kinds = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]} if is_hybrid else {}
    path = make_model(tmp_path, family, **kinds)
    layer = add_layer(path, seed=4)
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_batched_tokens": 24, "block_size": 4, "dtype": "float32"}
    wishes = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    requests = [
        Request(request_id=f"{turn} {number}", token_ids=prompt, sampling=wishes)
        for turn in range(2)
        for number, prompt in enumerate(make_prompts(4, 20))
    ]
    plain = answer(open_core(path, speculate="none", dtype="float32"), requests)
    tight = {"deepseek_v3": 0.06, "glm4_moe": 0.2, "qwen3_next": 0.25}[family]
    num_preempted = num_hits = 0
    for memory in (tight, 2.0):
        core = open_core(path, speculate="mtp", draft_tokens=NUM_DRAFTS, prefix_cache=True, kv_memory_mb=memory, **sizes)
        drafts = watch(core._runner._drafting._drafters["mtp"])
        found = answer(core, requests)
        assert differing_answers(found, plain) == []
        assert differing((path, layer), drafts[::20]) == []
        assert len([known for known, drafted in drafts if drafted]) > 100
        num_preempted, num_hits = num_preempted + found.num_preempted, num_hits + found.num_hits
    assert min(num_preempted, num_hits) > 0


@pytest.mark.parametrize("quant", ["none", "int8"])
def test_packed_weights_of_a_layer_are_kept_and_read_again(quant: str, model: Any, tmp_path: Path) -> None:
    wishes = {"speculate": "mtp", "draft_tokens": NUM_DRAFTS, "quant": quant, "weights_cache": str(tmp_path)}
    requests = [
        Request(
            request_id=str(number), token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        )
        for number, prompt in enumerate(make_prompts(2, 18))
    ]
    plain = answer(open_core(model[0], speculate="none", quant=quant), requests)
    drafts = []
    for _ in range(2):
        core = open_core(model[0], **wishes)
        drafts.append(watch(core._runner._drafting._drafters["mtp"]))
        assert differing_answers(answer(core, requests), plain) == []
    assert drafts[0] == drafts[1] != []


def test_a_model_without_such_a_layer_says_what_to_do(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama")
    with pytest.raises(CloisterError, match=r"has no layer that predicts further tokens.*choose another drafter"):
        open_core(path, speculate="mtp")
    assert open_core(path, speculate="auto").model.drafters == ("ngram",)
