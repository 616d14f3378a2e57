"""KV that came back from a tier has the bits of KV that was computed, for every number format and kind of attention."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cloister import LLM
from cloister.engine import EngineClient
from cloister.engine.core import EngineCore
from cloister.engine.kv_tier_worker import TierWorker
from cloister.executor.drafters import Draft, DraftRequest
from cloister.executor.drafters.recycling import RecyclingDrafter
from cloister.kv.two_sided import TwoSidedRestore
from cloister.launch import build_engine, resolve_settings
from cloister.launch.processes import make_engine
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.events import Ended, KVLoaded, Scheduled, Submit
from cloister.types.request import Request, SamplingParams
from tests.adapter_factory import write_adapter
from tests.model_factory import make_model

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, float32": ("llama", {"dtype": "float32", "kv_dtype": "float32"}),
    **{f"llama, {kv_dtype}": ("llama", {"kv_dtype": kv_dtype}) for kv_dtype in ("bfloat16", "int8", "int4")},
    "llama, kivi2": ("llama", {"kv_dtype": "kivi2", "block_size": 32}),
    "llama, torch": ("llama", {"backend": "torch"}),
    "windows": ("gemma3_text", {}),
    "latents": ("deepseek_v2", {}),
    "states": ("qwen3_next", {}),
    "states, torch": ("lfm2", {"backend": "torch"}),
    "states alone": ("mamba2", {}),
    "a sparse index": ("deepseek_v32", {"backend": "torch"}),
}


ADAPTER = "llama, an adapter"
ROUND_TRIPS: dict[str, tuple[str, dict[str, Any]]] = CASES | {
    ADAPTER: ("llama", {}),
    **{f"llama, blocks of {size}": ("llama", {"block_size": size}) for size in (1, 8, 64)},
    **{f"{kind}, blocks of {size}": (family, {"block_size": size})
       for kind, family in (("windows", "gemma3_text"), ("latents", "deepseek_v2")) for size in (1, 8, 64)},
    "int8, blocks of 1": ("llama", {"kv_dtype": "int8", "block_size": 1}),
    "int4, blocks of 64": ("llama", {"kv_dtype": "int4", "block_size": 64}),
}  # fmt: skip
"""Those that are not `CASES` are run in part where tests are to be quick."""
QUICK = {*CASES, ADAPTER, "llama, blocks of 1", "llama, blocks of 64", "windows, blocks of 8"}


class Runner:
    """An engine whose steps the test makes."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.adapter: str | None = None
        self.events: list[Any] = []
        self.outputs: list[Any] = []

    def answer(self, name: str, token_ids: list[int], max_tokens: int = 4, n: int = 1) -> list[tuple[Any, ...]]:
        """Returns its tokens and their log-probabilities; with `n`, answers are drawn, and come one after the other."""
        drawn: dict[str, Any] = {"n": n, "seed": 1, "temperature": 1.0} if n > 1 else {"temperature": 0.0}
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=5, **drawn)
        request = Request(request_id=name, token_ids=token_ids, sampling=sampling, adapter=self.adapter)
        self.core.input_queue.put(Submit(request))
        self.run_until(lambda: any(isinstance(e, Ended) and e.request_id == name and e.last for e in self.events))
        return [
            (token_id, score)
            for index in range(n)
            for output in self.outputs
            if output.request_id == name and output.index == index
            for token_id, score in zip(output.token_ids, output.logprobs, strict=True)
        ]

    def run_until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 300
        while not is_done():
            assert time.monotonic() < deadline_s, "it never happened"
            if (message := self.core.step()) is not None:
                self.events += message.events
                self.outputs += message.outputs

    def find(self, kind: type[Any], name: str) -> Any:
        return next(event for event in self.events if isinstance(event, kind) and event.request_id == name)


def make_config(folder: Path, family: str, settings: dict[str, Any]) -> EngineConfig:
    """Returns the configuration of an engine of a random model, which is written into a folder."""
    return EngineConfig(
        model=str(make_model(folder / "model", family)),
        num_threads=1,
        max_num_seqs=2,
        max_model_len=256,
        prefix_cache=True,
        weights_cache="",
        **settings,
    )


def prompt(number: int) -> list[int]:
    return [(17 * number + 7 * i + i * i) % 300 for i in range(150)]


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in ROUND_TRIPS]
)
def test_what_comes_back_has_the_bits_of_what_was_computed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    config = make_config(tmp_path, *ROUND_TRIPS[case])
    if case == ADAPTER:
        config = replace(config, lora=f"ann={write_adapter(tmp_path / 'adapter', Path(config.model))}")
    small = replace(config, kv_memory_mb=kv_mb(config) / 2)  # two prompts of 154 tokens do not fit
    plain, tiered = Runner(build_engine(small)), Runner(build_engine(small))
    if case == ADAPTER:
        without = Runner(build_engine(small)).answer("first", prompt(0))
        plain.adapter = tiered.adapter = tiered.core.adapters.loaded[0].digest
    # Less than the others' KV; with fewer slots states would go before they are written.
    host_kb = (1024 if "states" in case else 512) * kv_mb(config)
    tiered.core.open_kv_tiers(f"host:{host_kb:.0f}K+disk:{tmp_path},64M")
    try:
        tiered.core._tiers.tiers.predict_s = lambda tier_bytes: 0.0  # type: ignore[union-attr,method-assign]
        first = tiered.answer("first", prompt(0))
        for number in range(1, 5):
            tiered.answer(f"other {number}", prompt(number))
        tiered.run_until(lambda: not any(index._unwritten for index in tiered.core._tiers.tiers.indexes))  # type: ignore[union-attr]
        again = tiered.answer("again", prompt(0))
    finally:
        tiered.core._tiers.close()  # type: ignore[union-attr]
    loaded = tiered.find(KVLoaded, "again")
    assert "disk" in loaded.tier or case == "states alone"
    assert loaded.complete
    num_hit = (len(prompt(0)) - 1) // config.block_size * config.block_size  # the last token is computed
    assert tiered.find(Scheduled, "again").num_cached_tokens == loaded.num_tokens == num_hit
    assert again == first == plain.answer("first", prompt(0))
    assert case != ADAPTER or first != without, "the adapter changes nothing"


def draft_behind_decoys(request: DraftRequest, known: list[list[int]]) -> Draft:
    """Returns a tree in which each right token has a wrong sibling before it, so that KV of accepted ones has to move."""
    tokens = list(request.state.tokens)
    future = next((text[len(tokens) :] for text in known if text[: len(tokens)] == tokens), [])
    token_ids, parents, parent = list[int](), list[int](), -1
    for token_id in future[: request.num_drafts // 2]:
        token_ids += [(token_id + 1) % 300, token_id]
        parents += [parent, parent]
        parent = len(token_ids) - 1
    return Draft(token_ids, parents)


@pytest.mark.parametrize(
    ("family", "kv_dtype", "block_size", "where"),
    [
        ("llama", "bfloat16", 8, "host:{}K+disk:{},64M"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", "bfloat16", 1, "host:{}K+disk:{},64M"),
                ("llama", "bfloat16", 16, "disk:{1},64M"),
                ("llama", "int8", 8, "host:64M"),
                ("llama", "int4", 16, "host:{}K+disk:{},64M"),
                ("llama", "kivi2", 32, "host:{}K+disk:{},64M"),
                ("gemma3_text", None, 8, "host:{}K+disk:{},64M"),
                ("deepseek_v2", None, 8, "host:{}K+disk:{},64M"),
            )
        ),
    ],
)
def test_kv_of_accepted_paths_of_trees_and_of_forks_comes_back_with_its_bits(
    family: str, kv_dtype: str | None, block_size: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    monkeypatch.setattr(TierWorker, "_is_worth", lambda *_: True)  # neighbours are opened with one call, if that can be done
    config = make_config(tmp_path, family, {"block_size": block_size} | ({"kv_dtype": kv_dtype} if kv_dtype else {}))
    small = replace(config, kv_memory_mb=kv_mb(config) / 2)
    plain, begun = Runner(build_engine(small)), prompt(0)[:60]
    first, forked = plain.answer("first", begun, 60), plain.answer("forked", begun, 40, n=2)
    known = [[*begun, *(token_id for token_id, _ in answer)] for answer in (first, forked[:40], forked[40:])]
    monkeypatch.setattr(RecyclingDrafter, "_draft", lambda self, request: draft_behind_decoys(request, known))
    tiered = Runner(build_engine(replace(small, speculate="recycling", draft_tokens=8)))
    tiered.core.open_kv_tiers(where.format(f"{512 * kv_mb(config):.0f}", tmp_path), admission="always")
    program, num_moved = tiered.core._runner._program, 0  # type: ignore[attr-defined]
    move = program.move_positions

    def count(moves: Any) -> None:
        nonlocal num_moved
        num_moved += len(moves)
        move(moves)

    monkeypatch.setattr(program, "move_positions", count)
    try:
        tiered.core._tiers.tiers.predict_s = lambda tier_bytes: 0.0  # type: ignore[union-attr,method-assign]
        assert tiered.answer("first", begun, 60) == first
        assert num_moved, "no path but the first branch was accepted"
        assert tiered.answer("forked", begun, 40, n=2) == forked
        for number in range(1, 5):
            tiered.answer(f"other {number}", prompt(number))
        tiered.run_until(lambda: not any(index._unwritten for index in tiered.core._tiers.tiers.indexes))  # type: ignore[union-attr]
        again = [tiered.answer(f"again {number}", tokens) for number, tokens in enumerate(known)]
    finally:
        tiered.core._tiers.close()  # type: ignore[union-attr]
    loaded = tiered.find(KVLoaded, "again 0")
    assert loaded.complete
    assert loaded.num_tokens == (len(known[0]) - 1) // block_size * block_size > len(begun)
    assert again == [plain.answer(f"again {number}", tokens) for number, tokens in enumerate(known)]


CODED: dict[str, tuple[str, dict[str, Any]]] = {
    "bfloat16": ("llama", {"kv_dtype": "bfloat16"}),
    "float32": ("llama", {"dtype": "float32", "kv_dtype": "float32"}),
    "torch": ("llama", {"backend": "torch", "dtype": "float32"}),
    "windows": ("gemma3_text", {}),
    "latents": ("deepseek_v2", {}),
    "states beside": ("qwen3_next", {}),
}


TWO_SIDED = [
    *(case for case in CASES if case.startswith(("llama", "latents")) and "kivi2" not in case),
    "a sparse index",
    ADAPTER,
    "llama, blocks of 1",
    "llama, blocks of 8",
]
QUICK_TWO_SIDED = {"llama, bfloat16", "llama, int8", "llama, torch", "latents", ADAPTER}


@pytest.mark.parametrize(
    "case", [case if case in QUICK_TWO_SIDED else pytest.param(case, marks=pytest.mark.slow) for case in TWO_SIDED]
)
def test_a_front_that_was_computed_and_an_end_that_was_loaded_have_the_bits_of_what_was_computed(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    monkeypatch.setattr("cloister.scheduler.kv_restores.MAX_TIME_RATIO", 1e9)
    config = make_config(tmp_path, *ROUND_TRIPS[case])
    if case == ADAPTER:
        config = replace(config, lora=f"ann={write_adapter(tmp_path / 'adapter', Path(config.model))}")
    small = replace(config, kv_memory_mb=kv_mb(config) / 2)
    plain, tiered = Runner(build_engine(small)), Runner(build_engine(small))
    if case == ADAPTER:
        plain.adapter = tiered.adapter = tiered.core.adapters.loaded[0].digest
    tiered.core.open_kv_tiers("host:64M")
    tiers = tiered.core._tiers
    assert tiers is not None
    size = max(1, 16 // config.block_size)

    def find_next(restore: TwoSidedRestore, front: int, back: int, compute_s: object) -> int:
        """A few entries a step, and from the second step on something has arrived."""
        deadline_s = time.monotonic() + 300
        while any(not job.num_arrived and job.is_complete is None for job in tiers.worker._reads.values()):
            assert time.monotonic() < deadline_s, "nothing arrives"
            time.sleep(0.001)
        return min(back, front + size)

    monkeypatch.setattr(TwoSidedRestore, "find_next", find_next)
    try:
        first = tiered.answer("first", prompt(0))
        for number in range(1, 5):
            tiered.answer(f"other {number}", prompt(number))
        tiered.run_until(lambda: not any(index._unwritten for index in tiers.tiers.indexes))
        again = tiered.answer("again", prompt(0))
    finally:
        tiers.close()
    num_hit = (len(prompt(0)) - 1) // config.block_size * config.block_size
    num_cached, num_here = (tiered.find(kind, "again").num_cached_tokens for kind in (Ended, Scheduled))
    assert num_here < num_cached < num_hit, "one side did all"
    assert tiered.find(KVLoaded, "again").num_bytes
    assert again == first == plain.answer("first", prompt(0))


@pytest.mark.parametrize(
    ("case", "codec"),
    [
        ("bfloat16", "lossless"),
        ("windows", "fine"),
        *(
            pytest.param(case, codec, marks=pytest.mark.slow)
            for case, codec in product(CODED, ("lossless", "fine"))
            if (case, codec) not in (("bfloat16", "lossless"), ("windows", "fine"))
        ),
    ],
)
def test_compressed_kv_comes_back_with_its_bits_or_about_its_numbers(
    case: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    config = make_config(tmp_path, *CODED[case])
    tiered = Runner(build_engine(replace(config, kv_memory_mb=kv_mb(config) / 2)))
    tiered.core.open_kv_tiers(f"disk:{tmp_path},64M", codec=codec)
    tier: Any = tiered.core._tiers
    index = tier.tiers.indexes[0]
    plain_slots = index.layout.num_slots
    try:
        tier.tiers.predict_s = lambda tier_bytes: 0.0
        for number in range(1, 6):  # the codec measures its levels on the first blocks, and stores none of them
            tiered.answer(f"before {number}", prompt(number))
        tiered.run_until(lambda: not tier._is_choosing)
        assert tier._codec.chosen.level.name == codec
        first = tiered.answer("first", prompt(0))
        for number in range(6, 10):
            tiered.answer(f"other {number}", prompt(number))
        tiered.run_until(lambda: not index._unwritten)
        again = tiered.answer("again", prompt(0))
    finally:
        tier.close()
    loaded = tiered.find(KVLoaded, "again")
    assert loaded.tier == "disk"
    assert loaded.complete
    assert loaded.num_tokens == len(prompt(0)) // config.block_size * config.block_size
    index.check()
    sizes = zip(index.layout.block_bytes, index.layout.content_bytes, plain_slots, index.layout.num_slots, strict=True)
    ratios = [content / stored for stored, content, _, _ in sizes]
    assert max(ratios) > (1.05 if codec == "lossless" else 2.5)
    assert sum(index.layout.num_slots) >= sum(plain_slots)  # a slot has whole pages
    if codec == "lossless":
        assert again == first
    else:
        scores, others = ([score.logprob for _, score in answer] for answer in (first, again))
        assert scores != others
        assert scores[0] == pytest.approx(others[0], abs=0.2)


def test_a_lossy_codec_changes_the_fingerprint_and_an_exact_one_does_not(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", "llama"))
    config = EngineConfig(model=path, num_threads=1, weights_cache="", kv_tier="host:8M", max_model_len=256, max_num_seqs=2)
    prints = {
        (codec, numerics): build_engine(replace(config, kv_tier_codec=codec, numerics=numerics)).model.fingerprint
        for codec, numerics in ((None, "exact"), ("lossless", "exact"), ("fine", "fast"), ("coarse", "fast"))
    }
    assert prints[None, "exact"] == prints["lossless", "exact"]
    assert len(set(prints.values())) == 3


def test_kv_in_few_bits_is_not_compressed_again(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", "llama"))
    with pytest.raises(ConfigError, match="compresses KV in bfloat16 or float32"):
        LLM(model=path, num_threads=1, max_model_len=256, kv_dtype="int8", kv_tier="host:8M", kv_tier_codec="lossless")


def test_an_engine_with_a_lossy_codec_runs_where_answers_may_differ(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", "llama"))
    settings = {"model": path, "num_threads": 1, "max_model_len": 256, "max_num_seqs": 2, "numerics": "fast"}
    with LLM(kv_tier="host:8M", kv_tier_codec="auto-lossy", **settings) as llm:
        assert llm.generate("a prompt")
    with pytest.raises(ConfigError, match="always exact"):
        LLM(kv_tier="host:8M", **settings)


def kv_mb(config: EngineConfig) -> float:
    """KV of two sequences of full length, states included."""
    return sum(size for what, size in build_engine(config).memory if what in ("KV cache", "states")) / 2**20


def test_an_llm_has_a_tier_and_says_what_is_wrong_with_its_setting(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", "llama"))
    settings = {"model": path, "num_threads": 1, "max_model_len": 256, "max_num_seqs": 2}
    with LLM(kv_tier="host:8M", **settings) as llm:
        assert dict(llm.memory)["KV tier"] == 8 * 2**20
        assert llm.generate("a prompt")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        LLM(kv_tier=f"disk:{tmp_path / 'file' / 'missing'}", **settings)
    with pytest.raises(ConfigError, match="prefix_cache on"):
        LLM(kv_tier="host:8M", prefix_cache=False, **settings)
    with pytest.raises(ConfigError, match="such as host:4G"):
        LLM(kv_tier="host", **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_tier": "tape:1G"}, "unknown KV tier 'tape'; choose one of: host, shared, peer, disk"),
        ({"kv_tier": "host"}, "such as host:4G"),
        ({"kv_tier": "host:4G", "prefix_cache": False}, "keeps what the prefix cache evicts"),
        ({"kv_tier": "host:4G+host:1G"}, "at most one in memory and one disk"),
        ({"kv_tier": "host:4G+shared:1G", "replicas": 2}, "at most one in memory and one disk"),
        ({"kv_tier": "shared:1G"}, "set replicas to 2 or more without on, or give kv_tier host:SIZE"),
        ({"kv_tier": "shared", "replicas": 2}, "such as host:4G"),
        ({"kv_tier": "host:4G+tape:1G"}, "such as host:4G"),
        ({"kv_tier": "disk:/tmp", "replicas": 2}, "of several replicas each has a tier of its own"),
        ({"kv_tier_codec": "lossless"}, "set kv_tier, or leave it out"),
        ({"kv_tier_admission": "tinylfu"}, "chooses what kv_tier stores; set kv_tier, or leave it out"),
        ({"kv_tier": "host:4G", "kv_tier_codec": "fine"}, "choose lossless or auto, or set numerics fast"),
        ({"kv_tier": "host:4G", "kv_tier_codec": "auto-lossy"}, "choose lossless or auto, or set numerics fast"),
        ({"kv_tier": "host:4G", "kv_tier_codec": "zip"}, "kv_tier_codec"),
        ({"kv_tier": "shared:1G", "replicas": 2, "kv_tier_codec": "lossless"}, "a shared tier is not compressed"),
    ],
)
def test_a_setting_without_effect_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_settings(given)


@pytest.mark.parametrize("where", ["host:4G", "disk:/tmp,4G", "host:4G+disk:/tmp,4G"])
@pytest.mark.parametrize("profile", ["open", "team", "private", "paranoid"])
def test_strict_profiles_refuse_a_tier(where: str, profile: str) -> None:
    given = {"kv_tier": where, "profile": profile, "prefix_cache": profile != "paranoid"}
    if profile in ("open", "team"):
        assert resolve_settings(given).engine.config.kv_tier == where
        return
    with pytest.raises(PolicyError, match=rf"T6\.offload\.tier\.{profile}.*leave the setting `kv_tier` out"):
        resolve_settings(given)


def test_an_engine_whose_directory_is_gone_starts_again_without_a_tier(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    directory.mkdir()
    flags = {"num_threads": 1, "kv_memory_mb": 16, "kv_tier": f"disk:{directory},16M"}

    async def run() -> None:
        settings = resolve_settings(flags)
        engine = make_engine(settings.engine.config, settings.server.config)
        assert isinstance(engine, EngineClient)
        await engine.start()
        try:
            first = await ask(engine, "first")
            shutil.rmtree(directory)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            assert await ask(engine, "second") == first
        finally:
            await engine.drain(0.0)

    asyncio.run(run())


async def ask(engine: EngineClient, name: str) -> list[int]:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    request = Request(request_id=name, token_ids=list(range(40)), sampling=sampling, timeout_s=90.0)
    return [token_id async for output in engine.generate(request) for token_id in output.token_ids]
