"""Plans the address ranges of sequences (`--kv-layout virtual`), or reports why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cloister.backends.base import NO_RANGES, KVGroup, MemoryNeed
from cloister.backends.ranges import RangeLayout
from cloister.types.config import EngineConfig
from cloister.types.errors import ConfigError

OTHER_MAPPINGS: Final = 8192
"""Mappings left for everything else in the process: libraries, weights, stacks, allocators."""
_MAX_BLOCK_SIZE: Final = 256


def takes_ranges(config: EngineConfig, need: MemoryNeed) -> bool:
    """Whether the settings ask for address ranges.

    Raises:
        ConfigError: the back end does not support them for this model.
    """
    if config.kv_layout != "virtual":
        return False
    if not need.range_block_bytes:
        raise ConfigError(NO_RANGES, param="kv_layout")
    return True


def plan_ranges(
    config: EngineConfig, groups: Sequence[KVGroup], *, max_model_len: int, most_drafts: int, most_mappings: int
) -> RangeLayout:
    """Returns one range for each concurrent sequence, long enough for the longest.

    Args:
        most_drafts: most drafts of one sequence; their KV follows that of its tokens.
        most_mappings: limit of a process (`read_most_mappings`).

    Raises:
        ConfigError: layers have several block tables, or the ranges may need more mappings than the limit.
    """
    if len(groups) != 1 or groups[0].window is not None:
        raise ConfigError(NO_RANGES, param="kv_layout")

    def plan(num_ranges: int, block_size: int) -> RangeLayout:
        return RangeLayout(num_ranges, -(-(max_model_len + most_drafts) // block_size))

    left, layout = most_mappings - OTHER_MAPPINGS, plan(config.max_num_seqs, config.block_size)
    if layout.most_mappings <= left:
        return layout
    sizes = (min(config.block_size << doublings, _MAX_BLOCK_SIZE) for doublings in range(1, 9))
    fitting = next((size for size in sizes if plan(config.max_num_seqs, size).most_mappings <= left), None)
    num_fitting = (left - 2) // (layout.num_entries + 1)
    remedies = [] if fitting is None else [f"--block-size {fitting} or more"]
    remedies += [f"--max-num-seqs {num_fitting} or less"] if num_fitting > 0 else []
    remedies += [f"have the operator set vm.max_map_count to {layout.most_mappings + OTHER_MAPPINGS} or more"]
    raise ConfigError(
        f"--kv-layout virtual may need {layout.most_mappings} mappings for {config.max_num_seqs} sequences of {max_model_len} "
        f"tokens in blocks of {config.block_size}, and this system lets a process have {most_mappings}; set "
        f"{', or '.join(remedies)}",
        param="kv_layout",
    )


def read_most_mappings(root: Path = Path("/")) -> int:
    """Returns the limit on the mappings of a process.

    Raises:
        ConfigError: this is not Linux, which address ranges require.
    """
    try:
        return int((root / "proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        raise ConfigError("--kv-layout virtual needs Linux with /proc; leave it out", param="kv_layout") from None
