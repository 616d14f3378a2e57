"""Loads adapters into the slots of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cloister.backends.adapters import adapter_bytes, adapter_step_bytes
from cloister.backends.base import FloatArray, Program
from cloister.backends.spec import DecoderSpec
from cloister.models.adapters import Adapter, read_rank
from cloister.types.config import EngineConfig, parse_adapters
from cloister.types.errors import ConfigError
from cloister.types.request import AdapterInfo

RUNTIME_SLOTS: Final = 4
LEAST_RANK: Final = 16


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Limits of an engine for adapters.

    Attributes:
        given: (name, directory) of adapters to load at start.
        num_slots: maximum number of loaded adapters.
        max_rank: maximum rank of an adapter.
    """

    given: Sequence[tuple[str, str]]
    num_slots: int
    max_rank: int

    def num_bytes(self, spec: DecoderSpec, num_tokens: int) -> int:
        """Memory for adapters: every projection of every layer at the largest rank, and the activations of a step of
        `num_tokens`."""
        return self.num_slots * adapter_bytes(spec, self.max_rank) + adapter_step_bytes(spec, num_tokens)


def plan_room(config: EngineConfig) -> AdapterRoom | None:
    """Returns the limits from the settings; None if they request no adapters.

    Raises:
        ConfigError: the setting `lora` is not a list of NAME=DIRECTORY, or exceeds the configured limits.
        ModelError: one of its adapters cannot be read.
    """
    given = parse_adapters(config.lora or "")
    if not given and not config.runtime_adapters:
        return None
    most = max(len(given), RUNTIME_SLOTS if config.runtime_adapters else 0)
    if config.max_loras is not None and len(given) > config.max_loras:
        raise ConfigError(f"lora names {len(given)} adapters, and max_loras is {config.max_loras}; raise it", param="max_loras")
    for name, path in given:
        if not Path(path).expanduser().is_dir():
            raise ConfigError(
                f"--lora {name}={path}: there is no such folder; give the one that PEFT's save_pretrained wrote", param="lora"
            )
    rank = config.max_lora_rank or max([LEAST_RANK, *(read_rank(Path(path).expanduser()) for _, path in given)])
    return AdapterRoom(given, config.max_loras or most, rank)


class AdapterSlots:
    """The adapters of one program (protocol `engine.adapters.AdapterHost`).

    Args:
        program: the program that uses them.
        read: reads an adapter's directory, and calls what it is given meanwhile (`models.adapters.read_adapter`).
        num_slots: maximum number of loaded adapters.
    """

    def __init__(self, program: Program, read: Callable[[Path, Callable[[], None]], Adapter], num_slots: int) -> None:
        self._program, self._read, self._num_slots = program, read, num_slots
        self._slots: dict[str, int] = {}
        self._links: dict[str, FloatArray] = {}

    @property
    def slots(self) -> Mapping[str, int]:
        """Digest -> slot; changes as adapters are loaded and unloaded."""
        return self._slots

    @property
    def links(self) -> Mapping[str, FloatArray]:
        """Digest -> what link tokens read, [num_links, hidden], of adapters that have some; changes too."""
        return self._links

    def load(self, name: str, path: str, note_progress: Callable[[], None] = lambda: None) -> AdapterInfo:
        """Reads an adapter and loads it into a slot; identical weights are loaded only once.

        Args:
            note_progress: called from time to time meanwhile, as long as it goes on.

        Raises:
            ModelError: the adapter cannot be used.
            ConfigError: every slot is taken.
        """
        adapter = self._read(Path(path).expanduser(), note_progress)
        if adapter.digest not in self._slots:
            slot = self._free_slot()
            self._program.load_adapter(slot, adapter.weights)
            self._slots[adapter.digest] = slot
            if adapter.links is not None:
                self._links[adapter.digest] = adapter.links
        return AdapterInfo(
            name=name,
            digest=adapter.digest,
            path=path,
            rank=adapter.weights.rank,
            created_s=adapter.created_s,
            num_links=0 if adapter.links is None else len(adapter.links),
        )

    def unload(self, digest: str) -> None:
        """Empties the slot of an adapter."""
        self._program.unload_adapter(self._slots.pop(digest))
        self._links.pop(digest, None)

    def _free_slot(self) -> int:
        taken = set(self._slots.values())
        free = [slot for slot in range(self._num_slots) if slot not in taken]
        if not free:
            raise ConfigError(
                f"there are {len(taken)} adapters, and no room for more; unload one, or start with a larger --max-loras",
                param="max_loras",
            )
        return free[0]
