"""Loads the model and assembles one engine."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cloister.backends.base import Backend, Capability, KVGroup, KVLayout, Program
from cloister.backends.factories import FOREIGN_FAMILY
from cloister.backends.lookup_tables import copy_tables
from cloister.backends.spec import AttentionSpec, DecoderSpec, LayerGroup, group_layers
from cloister.backends.vision import AnyVisionSpec, QwenVisionSpec
from cloister.engine.kv_transfer import KVBlocks
from cloister.engine.machine import read_machine, return_free_memory
from cloister.engine.memory import OVERHEAD_BYTES, budget_memory
from cloister.kv import BlockGroup, BlockPool, KVFormat, PrefixKeys
from cloister.kv.codec_levels import is_lossy
from cloister.launch.backend import QUANT_VERSION, choose_backend_for, make_backend, write_in_few_bits
from cloister.launch.backend_choice import NO_QUANT
from cloister.launch.drafters import open_drafters
from cloister.launch.kept_files import kept_tokenizers, weights_cache
from cloister.launch.kv_ranges import plan_ranges, read_most_mappings, takes_ranges
from cloister.launch.loading import Loading
from cloister.models import LoadedModel, embedded_names, load, locate, read_pooling
from cloister.models.adapters import Adapter, read_adapter
from cloister.scheduler import BudgetConfig, Scheduler, SchedulerConfig
from cloister.scheduler.speculation import Speculation
from cloister.types.clock import Stopwatch
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError, MemoryBudgetError
from cloister.types.images import MAX_PIXELS_BYTES
from cloister.types.layerwise import CellLayout
from cloister.types.processes import overwrites
from cloister.types.request import ModelInfo

if TYPE_CHECKING:
    from cloister.engine import AdapterRegister, EngineCore
    from cloister.engine.memory_scrubber import MemoryScrubber
    from cloister.executor.adapters import AdapterRoom, AdapterSlots
    from cloister.launch.drafters import DraftersAtHand
    from cloister.text import Tokenizer

_logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> EngineCore:
    """Loads the model and assembles an engine; the entry point of the engine process.

    Raises:
        ModelError: the model cannot be used.
        MemoryBudgetError: it does not fit; the message states a figure that does.
    """
    with Loading(config.model) as loading:
        return _build(config, loading)


def _build(config: EngineConfig, loading: Loading, *, is_sealed: bool = False) -> EngineCore:
    from cloister.engine import EngineCore, OutputProcessor
    from cloister.engine.memory_scrubber import MemoryScrubber
    from cloister.engine.step_ahead import StepAhead
    from cloister.engine.thread_times import ThreadTimes
    from cloister.executor import Grammars, ModelRunner
    from cloister.executor.adapters import plan_room
    from cloister.executor.layerwise import MAX_ROWS
    from cloister.text import Tokenizer
    from cloister.text.grammar import GrammarCompiler

    watch = Stopwatch()
    machine = read_machine()
    path = locate(config.model, progress=True)  # may download, with a progress bar of its own
    watch.lap("locate")
    loading.begin("reading the model")
    is_local = config.model in embedded_names() or Path(config.model).expanduser().exists()
    cache = weights_cache(config)
    digests = None if cache is None else cache / "digests.json"
    model = load(path, None if is_local else config.model, digests, _longest(config), strict=config.strict_config)
    max_model_len, longest = _max_model_len(config, model), _longest_prompt(config, model)
    pooling = read_pooling(model.path, config.pooling, is_encoder=model.info.encoder is not None)
    loading.begin("reading the tokenizer")
    tokenizer = Tokenizer(model.path, remembers=not overwrites(config.profile), kept=kept_tokenizers(config), defers=True)
    watch.lap("read")
    return_free_memory()  # before the weights are loaded, so that the peaks do not add up
    model = write_in_few_bits(config, model, loading, tokenizer)
    backend = make_backend(config, machine, model.spec)
    max_rows = max(max_batched_tokens(config), MAX_ROWS if longest > max_model_len else 0)
    need = backend.need(model.spec, model.weights, block_size=config.block_size, max_batched_tokens=max_rows)
    if overwrites(config.profile):
        weights, need = copy_tables(model.weights, need)
        model = replace(model, weights=weights)
    has_ranges = takes_ranges(config, need)
    if has_ranges:
        need = replace(need, kv_block_bytes=need.range_block_bytes)
    drafters = open_drafters(config, model, backend, max_model_len=max_model_len, max_batched_tokens=max_batched_tokens(config))
    room = plan_room(config)
    groups = group_layers(model.spec, longest, need.recent_window) if need.kv_layer_bytes else []
    if drafters.names and groups and groups[0].window is not None:
        groups = _without_windows(groups)  # drafters keep KV of every position, with the block ids of the first group
    free_bytes = machine.available_bytes if need.available_bytes is None else need.available_bytes
    budget = budget_memory(
        drafters.add_blocks(need),
        available_bytes=int(config.memory_share * free_bytes),
        whole_bytes=free_bytes,
        follows_settings=is_sealed,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        groups=groups,
        max_batched_tokens=max_batched_tokens(config),
        kv_memory_mb=config.kv_memory_mb,
        adapters_bytes=0 if room is None else room.num_bytes(model.spec, max_batched_tokens(config)),
        drafters_bytes=drafters.fixed_bytes,
        tier_bytes=_host_tier_bytes(config),
        num_draft_rows=drafters.num_rows(config.max_num_seqs, max_batched_tokens(config)),
        num_drafts=drafters.num_drafts(config.max_num_seqs, max_batched_tokens(config)),
        most_drafts=drafters.most_drafts,
        overhead_bytes=OVERHEAD_BYTES + (0 if model.spec.vision is None else MAX_PIXELS_BYTES),
    )
    identity = f"{model.info.fingerprint} {config.quant} {QUANT_VERSION}"
    layout = KVLayout.of_groups(budget.groups, config.block_size)
    if has_ranges:
        sizes = {"max_model_len": longest, "most_drafts": drafters.most_drafts, "most_mappings": read_most_mappings()}
        layout = replace(layout, ranges=plan_ranges(config, budget.groups, **sizes))
    loading.begin("packing the weights, or reading them packed")
    program = backend.build(model.spec, model.weights, layout, identity=identity)
    if program.ranges is not None:
        _logger.info("KV at addresses in a row: %s", program.ranges.describe())
    loading.begin("starting the engine")
    drafters.allocate(program, KVLayout(budget.groups[0].num_blocks, config.block_size))
    host, adapters = _open_adapters(config, model.spec, program, room)
    watch.lap("build")
    fingerprint = _fingerprint(model, backend, config)
    info = msgspec.structs.replace(
        model.info,
        max_model_len=max_model_len,
        backend=choose_backend_for(config, model.spec),
        fingerprint=fingerprint,
        hidden_size=model.spec.hidden_size,
        pooling=pooling,
        drafters=drafters.names,
        default_max_tokens=config.default_max_tokens or None,
        family=model.spec.family,
        num_parameters=sum(prod(model.weights.shape(name)) for name in model.weights.names()),
        number_format="" if config.quant == NO_QUANT else config.quant,
        is_on_device=(config.device or "cpu") != "cpu",
        document_block_size=config.block_size if _takes_documents(model.spec, budget.groups) else 0,
        weighs_documents=Capability.DOCUMENT_WEIGHTS in program.capabilities,
        places_documents=_places_documents(model.spec, program),
        max_prefill_only_len=longest if longest > max_model_len else 0,
    )
    vocab_size = model.spec.vocab_size
    grammars = Grammars(GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=info.eos_token_ids))
    runner = ModelRunner(
        program,
        vocab_size=vocab_size,
        max_model_len=longest,
        block_size=config.block_size,
        adapters={} if host is None else host.slots,
        links={} if host is None else host.links,
        grammars=grammars,
        drafters=drafters.drafters,
        groups=budget.groups,
        vision=model.spec.vision,
        num_images_at_once=config.num_threads or 1,
    )
    drafters.bind(runner.sampling_metadata)
    if is_sealed and model.spec.vision is not None and Capability.IMAGES in program.capabilities:
        _rehearse_tower(model.spec.vision, program, config.dtype)
    public = _release_prefixes(config, model.path, tokenizer)
    scrubber = MemoryScrubber(runner.wipe_buffers) if overwrites(config.profile) else None
    return EngineCore(
        build_scheduler(config, info, budget.groups, public, drafters.speculation(), program.cells),
        runner,
        OutputProcessor(tokenizer, info),
        model=info,
        memory=list(budget.items),
        startup=watch.laps,
        adapters=adapters,
        grammars=grammars,
        encoding=runner.encoding,
        scrubber=scrubber,
        ahead=StepAhead(runner) if may_overlap(program, scrubber, drafters) else None,
        kv_blocks=_kv_blocks(info, budget.groups, config.block_size, program),
        thread_times=ThreadTimes(),
    )


def _takes_documents(spec: DecoderSpec, groups: Sequence[KVGroup]) -> bool:
    """Whether documents can be encoded separately: every layer attends to all positions, and a step computes only new ones."""
    return len(groups) == 1 and groups[0].window is None and not groups[0].is_state and spec.family != FOREIGN_FAMILY


def _places_documents(spec: DecoderSpec, program: Program) -> bool:
    """Whether a token may be rotated by a position other than its own: nothing but the rotation may depend on positions."""
    growing = any(isinstance(each.attention, AttentionSpec) and each.attention.query_growth for each in spec.layers)
    return Capability.DOCUMENT_WEIGHTS in program.capabilities and not spec.position_embeddings and not growing


def _host_tier_bytes(config: EngineConfig) -> int:
    """Returns the bytes of KV tiers in memory."""
    if config.kv_tier is None:
        return 0
    from cloister.engine.kv_tier_storage import parse_tiers

    return sum(where.limit_bytes for where in parse_tiers(config.kv_tier) if where.storage.is_memory)


def _kv_blocks(info: ModelInfo, groups: Sequence[KVGroup], block_size: int, program: Program) -> KVBlocks | None:
    """Describes the KV blocks that other engines may load; None if the program cannot export KV."""
    if Capability.KV_TRANSFER not in program.capabilities or not groups:
        return None
    firsts = [sum(group.num_blocks for group in groups[:number]) for number in range(len(groups))]
    sizes = tuple(len(content) for content in program.export_blocks(firsts))
    layout = repr([(sorted(group.layers), group.window, group.is_state) for group in groups])
    planes = [program.list_planes(first) for first in firsts]
    return KVBlocks(KVFormat(info.fingerprint, block_size, layout, sizes), program.export_blocks, planes)


def _rehearse_tower(vision: AnyVisionSpec, program: Program, dtype: str | None) -> None:
    """Encodes a blank image, because torch loads and generates code at the first one, which a locked-down process cannot do.

    Raises:
        ConfigError: images differ in size, and torch would generate code for each size.
    """
    if isinstance(vision, QwenVisionSpec) and dtype != "float32":
        raise ConfigError("a sealed node takes images of any size in float32 only; give --dtype float32", param="dtype")
    program.encode_image(vision.make_blank())


def may_overlap(program: Program, scrubber: MemoryScrubber | None, drafters: DraftersAtHand) -> bool:
    """Whether a step is planned while another one runs (decisions/0016).

    Not if buffers are overwritten between steps, nor with drafts: a sequence whose drafts are being verified has no next step
    yet, so the others' next step would run without it.
    """
    return Capability.ASYNCHRONOUS in program.capabilities and scrubber is None and not drafters.names


def build_program(config: EngineConfig, num_blocks: int) -> Program:
    """Loads the model and builds only its program, with the same number formats as an engine with these settings.

    Raises:
        ModelError: the model cannot be used.
    """
    machine = read_machine()
    path = locate(config.model, progress=True)
    with Loading(config.model) as loading:
        loading.begin("reading the model")
        model = write_in_few_bits(config, load(path, None, None, config.max_model_len, strict=config.strict_config), loading)
        backend = make_backend(config, machine, model.spec)
        identity = f"{model.info.fingerprint} {config.quant} {QUANT_VERSION}"
        loading.begin("packing the weights, or reading them packed")
        return backend.build(model.spec, model.weights, KVLayout(num_blocks, config.block_size), identity=identity)


def build_sealed_engine(config: EngineConfig) -> EngineCore:
    """Like `build_engine`, in a process that is locked down before it reports ready.

    Raises:
        HardeningError: the process cannot be locked down.
    """
    from cloister.launch.processes import close_engine

    with Loading(config.model, shown=False) as loading:  # a locked-down process must not have a progress thread
        core = _build(config, loading, is_sealed=True)
    close_engine()
    return core


def _open_adapters(
    config: EngineConfig, spec: DecoderSpec, program: Program, room: AdapterRoom | None
) -> tuple[AdapterSlots | None, AdapterRegister]:
    """Loads the adapters from the settings; returns them by digest, and the registry by name."""
    from cloister.engine import AdapterRegister
    from cloister.executor.adapters import AdapterSlots

    if room is None:
        return None, AdapterRegister()
    if Capability.ADAPTERS not in program.capabilities:
        raise ConfigError(
            "this back end has no adapters; leave `lora` and `runtime_adapters` out, or compute on a CPU", param="lora"
        )

    def read(path: Path, note_progress: Callable[[], None]) -> Adapter:
        return read_adapter(path, spec, max_rank=room.max_rank, note_progress=note_progress)

    host = AdapterSlots(program, read, room.num_slots)
    loaded = [host.load(name, path) for name, path in room.given]
    return host, AdapterRegister(host if config.runtime_adapters else None, loaded)


def _release_prefixes(config: EngineConfig, path: Path, tokenizer: Tokenizer) -> list[list[int]]:
    if config.release_prefixes is None:
        return []
    from cloister.text import ChatTemplate
    from cloister.text.chat import read_release_prefixes

    return read_release_prefixes(
        Path(config.release_prefixes).expanduser(), tokenizer, ChatTemplate.load(path, tokenizer.special)
    )


def build_scheduler(
    config: EngineConfig,
    model: ModelInfo,
    groups: Sequence[KVGroup],
    public: Sequence[Sequence[int]] = (),
    speculation: Speculation | None = None,
    cells: CellLayout | None = None,
) -> Scheduler:
    """Returns a scheduler with these settings, over a pool with the blocks of `groups`.

    Args:
        public: token ids of public prefixes.
        speculation: decides how much is drafted; None disables drafts.
        cells: the program's cells, with which prompts of up to `max_prefill_only_len` are computed layer by layer.

    Raises:
        ConfigError: public prefixes would take more than half of the blocks, or prompts cannot be computed layer by layer.
        MemoryBudgetError: the longest prompt that is computed layer by layer does not fit.
    """
    keys = PrefixKeys(model.fingerprint, config.block_size, public)
    num_blocks = min((group.num_blocks for group in groups if not group.is_state), default=2**62)  # prefixes take no states
    if len(keys.public) > num_blocks // 2:
        raise ConfigError(
            f"release_prefixes take {len(keys.public)} of {num_blocks} KV blocks; shorten them or raise kv_memory_mb",
            param="release_prefixes",
        )
    target_s = config.target_step_ms / 1e3 if config.target_step_ms is not None else None
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            policy=config.scheduler,
            budget=BudgetConfig(max_batched_tokens(config), target_s, config.max_stall, config.stall_floor_ms / 1e3),
            eos_token_ids=model.eos_token_ids,
            prefix_cache=bool(config.prefix_cache),
            cache_scopes=config.cache_scopes or 0,
            num_images_at_once=config.num_threads or 1,
            max_prefill_only_len=model.max_prefill_only_len,
            weighs_documents=model.weighs_documents,
            places_documents=model.places_documents,
        ),
        BlockPool([_block_group(group, config) for group in groups], config.block_size),
        keys,
        speculation,
        cells if model.max_prefill_only_len else None,
    )
    _check_prefill_only(model.max_prefill_only_len, scheduler.max_layerwise_positions)
    if scheduler.lacks_shares:
        _logger.warning(
            "the prefix cache keeps nothing: %d KV blocks do not suffice for the longest sequence and a share for each of %d "
            "tenants or sessions; raise --kv-memory-mb, or set --max-model-len to less",
            num_blocks,
            config.cache_scopes,
        )
    return scheduler


def _check_prefill_only(longest: int, num_positions: int) -> None:
    """Raises an error unless the longest prompts can be computed layer by layer, and fit into KV memory."""
    if not longest or longest <= num_positions:
        return
    if not num_positions:
        raise ConfigError(
            "this model or back end cannot compute prompts layer by layer: that needs a CPU, --kv-layout paged, and "
            "layers that all have KV of one size and no window, state, or image; leave max_prefill_only_len out",
            param="max_prefill_only_len",
        )
    raise MemoryBudgetError(
        f"KV memory holds prompts of {num_positions} tokens if they are computed layer by layer, and max_prefill_only_len is "
        f"{longest}; set it to {num_positions} or less, or raise --kv-memory-mb by a factor of {longest / num_positions:.2f}",
        param="max_prefill_only_len",
    )


def _without_windows(groups: Sequence[LayerGroup]) -> list[LayerGroup]:
    """Returns groups in which all layers with attention keep every position."""
    layers = frozenset[int]().union(*(group.layers for group in groups if not group.is_state))
    return [LayerGroup(layers), *(group for group in groups if group.is_state or group.is_recent)]


def _block_group(group: KVGroup, config: EngineConfig) -> BlockGroup:
    if group.is_state:
        return BlockGroup.of_state(group.num_blocks)
    if group.window is None:
        return BlockGroup(group.num_blocks)
    # The positions that a query sees, and those that one step computes before any leaves the window. Blocks are released when
    # the next one is full, so a step may begin anywhere in a block, and the two parts need not share one.
    parts = (group.window, max_batched_tokens(config))
    return BlockGroup(group.num_blocks, group.window, 1 + sum(-(-part // config.block_size) for part in parts))


def _max_model_len(config: EngineConfig, model: LoadedModel) -> int:
    trained = model.spec.max_positions
    if config.max_model_len is not None and config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} and the model was trained for {trained} positions; set {trained} or less",
            param="max_model_len",
        )
    return config.max_model_len or trained


def _longest(config: EngineConfig) -> int | None:
    """Returns the longest prompt in the settings, which may affect rotations of positions; None for the model's maximum."""
    if config.max_model_len is None:
        return None
    return max(config.max_model_len, config.max_prefill_only_len or 0)


def _longest_prompt(config: EngineConfig, model: LoadedModel) -> int:
    trained = model.spec.max_positions
    if config.max_prefill_only_len is not None and config.max_prefill_only_len > trained:
        raise ConfigError(
            f"max_prefill_only_len is {config.max_prefill_only_len} and the model was trained for {trained} positions; set "
            f"{trained} or less",
            param="max_prefill_only_len",
        )
    return _longest(config) or trained


def max_batched_tokens(config: EngineConfig) -> int:
    """Tokens in one step: on a CPU longer steps gain little, and buffers stay small."""
    return config.max_batched_tokens or (1024 if (config.device or "cpu") == "cpu" else 2048)


def _torch_version() -> str:
    from importlib.metadata import version

    return version("torch")


def _fingerprint(model: LoadedModel, backend: Backend, config: EngineConfig) -> str:
    """Returns `system_fingerprint`, a digest of all that the bits of an answer depend on."""
    # the maximum length of a sequence may affect rotations
    turns = repr([layer.attention and layer.attention.rope for layer in model.spec.layers])
    tower = [] if model.spec.vision is None else [_torch_version()]  # torch computes towers for every back end
    lossy = [f"kv_tier_codec {config.kv_tier_codec}"] if is_lossy(config.kv_tier_codec) else []
    parts = (model.info.fingerprint, backend.fingerprint, config.quant, str(QUANT_VERSION), turns, *tower, *lossy)
    return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
