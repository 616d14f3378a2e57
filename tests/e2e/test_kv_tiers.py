"""KV that came back from a tier has the bits of KV that was computed, for every number format and kind of attention."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloister import LLM
from cloister.engine import EngineClient
from cloister.engine.core import EngineCore
from cloister.launch import build_engine, resolve_settings
from cloister.launch.processes import make_engine
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError, PolicyError
from cloister.types.events import Ended, KVLoaded, Scheduled, Submit
from cloister.types.request import Request, SamplingParams
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


class Runner:
    """An engine whose steps the test makes."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.events: list[Any] = []
        self.outputs: list[Any] = []

    def answer(self, name: str, token_ids: list[int]) -> list[tuple[Any, ...]]:
        """Returns its tokens and their log-probabilities."""
        sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=5)
        self.core.input_queue.put(Submit(Request(request_id=name, token_ids=token_ids, sampling=sampling)))
        self.run_until(lambda: any(isinstance(e, Ended) and e.request_id == name for e in self.events))
        return [
            (token_id, score)
            for output in self.outputs
            if output.request_id == name
            for token_id, score in zip(output.token_ids, output.logprobs, strict=True)
        ]

    def run_until(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 90.0
        while not is_done():
            assert time.monotonic() < deadline_s, "it never happened"
            if (message := self.core.step()) is not None:
                self.events += message.events
                self.outputs += message.outputs

    def find(self, kind: type[Any], name: str) -> Any:
        return next(event for event in self.events if isinstance(event, kind) and event.request_id == name)


def prompt(number: int) -> list[int]:
    return [(17 * number + 7 * i + i * i) % 300 for i in range(150)]


@pytest.mark.parametrize("case", CASES)
def test_what_comes_back_has_the_bits_of_what_was_computed(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloister.scheduler.kv_restores.MIN_READ_S", 60.0)
    family, settings = CASES[case]
    config = EngineConfig(
        model=str(make_model(tmp_path / "model", family)),
        num_threads=1,
        max_num_seqs=2,
        max_model_len=256,
        prefix_cache=True,
        weights_cache="",
        **settings,
    )
    small = replace(config, kv_memory_mb=kv_mb(config) / 2)  # two prompts of 154 tokens do not fit
    plain, tiered = Runner(build_engine(small)), Runner(build_engine(small))
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
    size = len(prompt(0))
    assert (
        tiered.find(Scheduled, "again").num_cached_tokens == loaded.num_tokens == size // config.block_size * config.block_size
    )
    assert again == first == plain.answer("first", prompt(0))


def kv_mb(config: EngineConfig) -> float:
    """KV of two sequences of full length, states included."""
    return sum(size for what, size in build_engine(config).memory if what in ("KV cache", "states")) / 2**20


def test_an_llm_has_a_tier_and_says_what_is_wrong_with_its_setting(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", "llama"))
    settings = {"model": path, "num_threads": 1, "max_model_len": 256, "max_num_seqs": 2}
    with LLM(kv_tier="host:8M", **settings) as llm:
        assert dict(llm.memory)["KV tier"] == 8 * 2**20
        assert llm.generate("a prompt")
    with pytest.raises(ConfigError, match="No such file or directory"):
        LLM(kv_tier=f"disk:{tmp_path / 'missing'}", **settings)
    with pytest.raises(ConfigError, match="prefix_cache on"):
        LLM(kv_tier="host:8M", prefix_cache=False, **settings)
    with pytest.raises(ConfigError, match="such as host:4G"):
        LLM(kv_tier="host", **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_tier": "tape:1G"}, "unknown KV tier 'tape'; choose one of: host, shared, disk"),
        ({"kv_tier": "host"}, "such as host:4G"),
        ({"kv_tier": "host:4G", "prefix_cache": False}, "keeps what the prefix cache evicts"),
        ({"kv_tier": "host:4G+host:1G"}, "each kind once"),
        ({"kv_tier": "host:4G+shared:1G", "replicas": 2}, "each kind once"),
        ({"kv_tier": "shared:1G"}, "set replicas to 2 or more without on, or give kv_tier host:SIZE"),
        ({"kv_tier": "shared", "replicas": 2}, "such as host:4G"),
        ({"kv_tier": "host:4G+tape:1G"}, "such as host:4G"),
        ({"kv_tier": "disk:/tmp", "replicas": 2}, "of several replicas each has a tier of its own"),
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
