"""The messages that an operator sees at start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cloister.launch.settings import Settings
from cloister.types.config import AUTO_DRAFTER, EngineConfig
from cloister.types.request import ModelInfo


def describe_start(
    settings: Settings,
    model: ModelInfo,
    memory: Sequence[tuple[str, int]],
    startup: Sequence[tuple[str, float]],
    notice: str | None,
) -> Iterator[str]:
    """Yields the lines that an operator reads at start: what runs and drafts, the profile, where memory and time went."""
    config = settings.engine.config
    yield f"{model.name} ({model.fingerprint}) on {config.backend}, {config.device}, {config.num_threads} threads"
    yield f"profile {config.profile}, scheduler {config.scheduler}, prefix cache {'on' if config.prefix_cache else 'off'}"
    yield f"context window {model.max_model_len} tokens, {config.max_num_seqs} sequences at once"
    yield f"drafts: {_say_drafts(config, model.drafters)}"
    items = [*memory, ("in all", sum(size for _, size in memory))]
    yield "memory, at most: " + ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in items)
    whole_s = sum(duration_s for _, duration_s in startup)
    yield f"started in {whole_s:.1f} s: " + ", ".join(f"{phase} {duration_s:.2f}" for phase, duration_s in startup)
    if notice is not None:
        yield notice


def _say_drafts(config: EngineConfig, drafters: Sequence[str]) -> str:
    if not drafters:
        return "none"
    notes = []
    if config.speculate == AUTO_DRAFTER:
        notes.append("auto")
    if config.draft_tokens is not None:
        notes.append(f"{config.draft_tokens} token{'' if config.draft_tokens == 1 else 's'} a step")
    return ", ".join(drafters) + (f" ({', '.join(notes)})" if notes else "")
