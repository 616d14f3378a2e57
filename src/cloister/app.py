"""The only place where the rooms are put together."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cloister.backends import BACKENDS, native
from cloister.backends.base import Backend, KVLayout, Weights
from cloister.backends.spec import DecoderSpec
from cloister.engine.machine import Machine, read_machine, return_free_memory
from cloister.engine.memory import budget_memory
from cloister.kv import BlockPool, PrefixKeys
from cloister.models import LoadedModel, embedded_names, load, locate
from cloister.privacy import Entry, Gate, Policy, is_loopback, read_credentials, settle
from cloister.quant import FORMATS, FormatOptions, NumberFormat, choose_kv_dtype, quantize_on_read
from cloister.sched import POLICIES, BudgetConfig, Scheduler, SchedulerConfig
from cloister.types.config import (
    EngineConfig,
    Resolved,
    ServerConfig,
    reject_unknown,
    resolve,
    setting_names,
)
from cloister.types.errors import ConfigError
from cloister.types.request import ModelInfo

if TYPE_CHECKING:
    from cloister.engine import EngineCore
    from cloister.server.serve import Site

ENGINE_ENTRY: Final = "cloister.app:build_engine"
NO_QUANT: Final = "none"
QUANT_VERSION: Final = 1
"""Raise it when a number format writes other codes for the same weights."""
OFFLINE_STALL: Final = 100.0
"""`max_stall` of an engine that no server stands before: prompts go in as fast as they can."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that was decided before anything was loaded, and why."""

    engine: Resolved[EngineConfig]
    server: Resolved[ServerConfig]
    policy: Policy


def resolve_settings(
    flags: Mapping[str, object] | None = None, config_file: Path | None = None, *, listens: bool = True
) -> Settings:
    """Resolves settings from flags, a TOML file, the machine and the privacy profile.

    Args:
        flags: settings by name; None values do not count.
        listens: False for an engine that no socket leads to, such as `LLM`'s.

    Raises:
        ConfigError: a setting is unknown, has no meaning or contradicts another one.
        PolicyError: the profile denies what a setting asks for.
    """
    known = setting_names(EngineConfig, ServerConfig)
    known_flags = known if listens else setting_names(EngineConfig)
    layers: list[tuple[str, Mapping[str, object]]] = []
    if not listens:
        layers.append(("nobody watches the streams of a batch", {"max_stall": OFFLINE_STALL}))
    if config_file is not None:
        from_file = _read_toml(config_file)
        reject_unknown(from_file, known, config_file.name)
        layers.append((f"file {config_file.name}", from_file))
    if flags:
        reject_unknown(flags, known_flags, "the settings given")
        layers.append(("flag", flags))
    server = resolve(ServerConfig, layers)
    engine = _settle_machine(resolve(EngineConfig, layers), read_machine())
    policy, engine = settle(
        engine,
        loopback=not listens or is_loopback(server.config.host),
        has_api_keys=listens and server.config.api_keys is not None,
        entries=(
            Entry.of(BACKENDS, chosen_backend(engine.config)),
            Entry.of(POLICIES, engine.config.scheduler),
            *([] if engine.config.quant == NO_QUANT else [Entry.of(FORMATS, engine.config.quant)]),
        ),
    )
    return Settings(engine, server, policy)


def build_gate(settings: Settings) -> Gate:
    """Returns who lets requests in.

    Raises:
        ConfigError: the API key file cannot be used.
    """
    server = settings.server.config
    credentials = read_credentials(Path(server.api_keys).expanduser()) if server.api_keys is not None else None
    return Gate(settings.policy, credentials, loopback=is_loopback(server.host))


def serve(settings: Settings, announce: Callable[[str], None] = print) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status.

    Args:
        announce: told, line by line, what was started and with what memory.

    Raises:
        CloisterError: something cannot be used or does not fit; the message says what to do.
    """
    from cloister.server.serve import serve as serve_site

    gate = build_gate(settings)
    return serve_site(settings.server.config, lambda: _open_site(settings, gate, announce), announce)


async def _open_site(settings: Settings, gate: Gate, announce: Callable[[str], None]) -> Site:
    """Starts the engine process, and the front that talks to it."""
    from cloister.engine import ProcessEngine
    from cloister.server.app import create_app
    from cloister.server.serve import Site
    from cloister.text import ChatTemplate, Tokenizer

    config = settings.engine.config
    engine = ProcessEngine(ENGINE_ENTRY, config)
    await engine.start()
    try:
        path = Path(engine.model.path)
        app = create_app(
            engine,
            Tokenizer(path),
            ChatTemplate.load(path),
            gate,
            settings.server.config,
            request_timeout_s=config.request_timeout_s,
        )
    except BaseException:
        await engine.drain(0.0)
        raise
    return_free_memory()
    for line in describe_start(settings, engine.model, engine.memory, gate.notice()):
        announce(line)
    return Site(app, engine)


def describe_start(
    settings: Settings, model: ModelInfo, memory: Sequence[tuple[str, int]], notice: str | None
) -> Iterator[str]:
    """Yields the lines that an operator reads at start: what runs, under which profile, and where the memory goes."""
    config = settings.engine.config
    yield f"{model.name} ({model.fingerprint}) on {config.backend}, {config.device}, {config.num_threads} threads"
    yield f"profile {config.profile}, scheduler {config.scheduler}, prefix cache {'on' if config.prefix_cache else 'off'}"
    yield f"context window {model.max_model_len} tokens, {config.max_num_seqs} sequences at once"
    items = [*memory, ("in all", sum(size for _, size in memory))]
    yield "memory: " + ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in items)
    if notice is not None:
        yield notice


def build_engine(config: EngineConfig) -> EngineCore:
    """Loads the model and puts an engine together; the entry point of the engine process.

    Raises:
        ModelError: the model cannot be used.
        MemoryBudgetError: it cannot fit; the message has the figure that would.
    """
    from cloister.engine import EngineCore, Output
    from cloister.runner import ModelRunner
    from cloister.text import Tokenizer

    machine = read_machine()
    path = locate(config.model, progress=True)
    is_local = config.model in embedded_names() or Path(config.model).expanduser().exists()
    cache = _weights_cache(config)
    model = load(path, name=None if is_local else config.model, digests=None if cache is None else cache / "digests.json")
    max_model_len = _max_model_len(config, model)
    tokenizer = Tokenizer(model.path)
    return_free_memory()  # before the weights are there, so that it does not count on top of them
    weights = _write_in_few_bits(config, model)
    backend = make_backend(config, machine, model.spec)
    need = backend.need(model.spec, weights, block_size=config.block_size, max_batched_tokens=_max_batched_tokens(config))
    budget = budget_memory(
        need,
        available_bytes=machine.available_bytes if need.available_bytes is None else need.available_bytes,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_memory_mb=config.kv_memory_mb,
    )
    identity = f"{model.info.fingerprint} {config.quant} {QUANT_VERSION}"
    program = backend.build(model.spec, weights, KVLayout(budget.num_blocks, config.block_size), identity=identity)
    fingerprint = _fingerprint(model, backend, config)
    info = msgspec.structs.replace(model.info, max_model_len=max_model_len, fingerprint=fingerprint)
    runner = ModelRunner(program, vocab_size=model.spec.vocab_size, max_model_len=max_model_len, block_size=config.block_size)
    return EngineCore(
        build_scheduler(config, info, budget.num_blocks),
        runner,
        Output(tokenizer, info),
        model=info,
        memory=list(budget.items),
    )


def build_scheduler(config: EngineConfig, model: ModelInfo, num_blocks: int) -> Scheduler:
    """Returns a scheduler as the settings want it, over `num_blocks` blocks of its own."""
    target_s = config.target_step_ms / 1e3 if config.target_step_ms is not None else None
    return Scheduler(
        SchedulerConfig(
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            policy=config.scheduler,
            budget=BudgetConfig(_max_batched_tokens(config), target_s, config.max_stall, config.stall_floor_ms / 1e3),
            eos_token_ids=model.eos_token_ids,
            prefix_cache=bool(config.prefix_cache),
        ),
        BlockPool(num_blocks, config.block_size),
        PrefixKeys(model.fingerprint, config.block_size),
    )


def make_backend(config: EngineConfig, machine: Machine, spec: DecoderSpec) -> Backend:
    """Returns the back end that the settings name, for a model of that spec."""
    factory = BACKENDS.get(chosen_backend(config))
    return factory(
        num_threads=config.num_threads or machine.num_cpus,
        device=config.device or "cpu",
        dtype=config.dtype,
        kv_dtype=config.kv_dtype or (None if config.quant == NO_QUANT else choose_kv_dtype(number_format(config.quant), spec)),
        numerics=config.numerics,
        store=_weights_cache(config),
        store_bytes=round(config.weights_cache_mb * (1 << 20)),
    )


def chosen_backend(config: EngineConfig) -> str:
    """Returns the name of the back end: the setting, or what `_settle_machine` would choose."""
    return config.backend or _choose_backend(config.device or "cpu")[0]


def _choose_backend(device: str) -> tuple[str, str]:
    """Returns a back end's name and why."""
    if device != "cpu":
        return "torch", f"the device is {device}"
    reason = native.available()
    return ("native", "the device is a CPU") if reason is None else ("torch", reason)


def number_format(name: str) -> NumberFormat:
    """Returns the number format of that name with its own options."""
    return FORMATS.get(name)(FormatOptions())


def _write_in_few_bits(config: EngineConfig, model: LoadedModel) -> Weights:
    """Returns the model's weights, quantised as they are read if the settings say so."""
    if config.quant == NO_QUANT:
        return model.weights
    return quantize_on_read(model.spec, model.weights, number_format(config.quant))


def _weights_cache(config: EngineConfig) -> Path | None:
    return Path(config.weights_cache).expanduser() if config.weights_cache else None


def _settle_machine(engine: Resolved[EngineConfig], machine: Machine) -> Resolved[EngineConfig]:
    """Fills what the machine decides."""
    chosen: dict[str, tuple[object, str]] = {}
    if engine.config.num_threads is None:
        chosen["num_threads"] = (machine.num_cpus, f"CPUs that this process may use ({machine.num_cpus})")
    if engine.config.device is None:
        has_gpu = Path("/dev/nvidiactl").exists()
        chosen["device"] = ("cuda", "there is an NVIDIA device") if has_gpu else ("cpu", "there is no NVIDIA device")
    if engine.config.backend is None:
        device = str(chosen["device"][0]) if "device" in chosen else engine.config.device
        chosen["backend"] = _choose_backend(device or "cpu")
    return engine.explain(**chosen)


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    trained = model.spec.max_positions
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} and the model was trained for {trained} positions; set {trained} or less",
            param="max_model_len",
        )
    return config.max_model_len or trained


def _max_batched_tokens(config: EngineConfig) -> int:
    """Tokens in one step: on a CPU longer ones win little, and buffers stay small."""
    return config.max_batched_tokens or (1024 if (config.device or "cpu") == "cpu" else 2048)


def _fingerprint(model: LoadedModel, backend: Backend, config: EngineConfig) -> str:
    """What the bits of an answer depend on (rule 6), as `system_fingerprint`."""
    parts = (model.info.fingerprint, backend.fingerprint, config.quant, str(QUANT_VERSION))
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the config file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file {path} is not TOML: {error}") from None
