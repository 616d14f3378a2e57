"""Checks whether a model fits into memory, by the shapes of its tensors."""

from __future__ import annotations

from cloister.backends.spec import group_layers
from cloister.engine.machine import read_machine
from cloister.engine.memory import MemoryBudget, budget_memory
from cloister.launch.backend import make_backend
from cloister.launch.engine import max_batched_tokens
from cloister.models import LoadedModel
from cloister.types.config import EngineConfig


def budget_model(config: EngineConfig, model: LoadedModel) -> MemoryBudget:
    """Returns the memory that an engine with these settings would need, without drafters and adapters.

    Raises:
        MemoryBudgetError: it does not fit; the message states a figure that does.
        ConfigError: the back end is not usable.
    """
    machine = read_machine()
    backend = make_backend(config, machine, model.spec)
    num_tokens = max_batched_tokens(config)
    need = backend.need(model.spec, model.weights, block_size=config.block_size, max_batched_tokens=num_tokens)
    return budget_memory(
        need,
        available_bytes=machine.available_bytes if need.available_bytes is None else need.available_bytes,
        block_size=config.block_size,
        max_model_len=config.max_model_len or model.spec.max_positions,
        max_num_seqs=config.max_num_seqs,
        groups=group_layers(model.spec, config.max_model_len or model.spec.max_positions, need.recent_window),
        max_batched_tokens=num_tokens,
        kv_memory_mb=config.kv_memory_mb,
    )
