"""Admission to a full tier: whether a block is worth evicting another one. Pure: no I/O, no clock; it is given its salt.

A tier evicts its least recently used block. That is right if blocks used lately are used again soon. Where most blocks are used
once (documents, conversations that end), they evict system prompts and other prefixes that many requests share. `tinylfu`
stores a block only if it is used more often than the one that would be evicted (TinyLFU, Einziger et al. 2017; M5, ASPLOS 2025,
counts pages of slow memory in the same way). `auto` simulates both and uses the one with more hits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final, Protocol

from cloister.kv.access_sketch import AccessSketch
from cloister.types.registry import Registry
from cloister.types.threat import Requirement, ThreatProfile

MAX_SAMPLE_INTERVAL: Final = 8
"""`auto` simulates with at least one key of so many."""
MIN_SIMULATED_SLOTS: Final = 64
"""Minimum number of simulated slots, if the tier has as many."""
MIN_GAIN: Final = 1.15
"""`auto` compares by frequency if that had so many times the hits in the simulation."""
ACCESSES_PER_SLOT: Final = 4
"""The hits of both simulations are halved after this many accesses per slot."""


class TierAdmission(Protocol):
    """Decides which blocks of one owner a tier stores."""

    @property
    def is_by_frequency(self) -> bool:
        """Whether blocks are compared by frequency of use; else by recency."""
        ...

    def note(self, keys: Sequence[bytes]) -> None:
        """Takes accesses to the blocks of a chain, found or not, in their order."""
        ...

    def admits(self, key: bytes, oldest: bytes) -> bool:
        """Whether to store a block in place of the owner's least recently used one.

        Args:
            oldest: key of that one.
        """
        ...


AdmissionFactory = Callable[[int], TierAdmission]
"""Takes the slots of an owner."""


class AdmitAll:
    """Stores every block, in place of the least recently used one."""

    is_by_frequency = False

    def __init__(self, num_slots: int = 0, salt: bytes = b"") -> None:
        pass

    def note(self, keys: Sequence[bytes]) -> None:
        pass

    def admits(self, key: bytes, oldest: bytes) -> bool:
        return True


class TinyLFU:
    """Stores a block if it was accessed more often than the one that would be evicted.

    Args:
        num_slots: of the owner.
        salt: of the sketch.
    """

    is_by_frequency = True

    def __init__(self, num_slots: int, salt: bytes) -> None:
        self.sketch = AccessSketch(num_slots, salt)

    def note(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.sketch.add(key)

    def admits(self, key: bytes, oldest: bytes) -> bool:
        return self.sketch.estimate(key) > self.sketch.estimate(oldest)


class AdaptiveAdmission:
    """Admits as `TinyLFU` while that has more hits in a simulation than storing every block.

    Both are simulated with a hash-based sample of keys and the same share of the slots (miniature simulation, Waldspurger et
    al. 2017).

    Args:
        num_slots: of the owner.
        salt: of the sketch and of the sample.
    """

    def __init__(self, num_slots: int, salt: bytes) -> None:
        self._salt = salt
        self._frequency = TinyLFU(num_slots, salt)
        self._interval = min(MAX_SAMPLE_INTERVAL, max(1, num_slots // MIN_SIMULATED_SLOTS))
        num_simulated = max(1, num_slots // self._interval)
        self._simulations = (_Simulation(num_simulated, AdmitAll()), _Simulation(num_simulated, self._frequency))
        self._period = ACCESSES_PER_SLOT * num_simulated
        self._num_sampled = 0

    @property
    def is_by_frequency(self) -> bool:
        everything, frequent = self._simulations
        return frequent.num_hits > MIN_GAIN * everything.num_hits

    def note(self, keys: Sequence[bytes]) -> None:
        self._frequency.note(keys)
        for key in reversed(keys):  # as in a tier, where the end of a prefix goes before its beginning
            if self._is_sampled(key):
                for simulation in self._simulations:
                    simulation.access(key)
                self._num_sampled += 1
                if self._num_sampled % self._period == 0:
                    for simulation in self._simulations:
                        simulation.num_hits /= 2

    def admits(self, key: bytes, oldest: bytes) -> bool:
        return not self.is_by_frequency or self._frequency.admits(key, oldest)

    def _is_sampled(self, key: bytes) -> bool:
        number = int.from_bytes(blake2b(key, digest_size=4, key=self._salt).digest())
        return number % self._interval == 0


class _Simulation:
    """A tier of keys without blocks.

    Attributes:
        num_hits: hits; old ones count less.
    """

    __slots__ = ("_admission", "_keys", "_num_slots", "num_hits")

    def __init__(self, num_slots: int, admission: TierAdmission) -> None:
        self._num_slots, self._admission = num_slots, admission
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.num_hits = 0.0

    def access(self, key: bytes) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)
            self.num_hits += 1
            return
        if len(self._keys) >= self._num_slots:
            oldest = next(iter(self._keys))
            if not self._admission.admits(key, oldest):
                return
            del self._keys[oldest]
        self._keys[key] = None


def _make_threat(residue: str, *mitigations: str) -> ThreatProfile:
    return ThreatProfile(
        row="disk or host offload",
        threats=frozenset({Requirement.STATELESS, Requirement.ENFORCEABLE}),
        residue=residue,
        where=("host memory",),
        attack="inference by timing: what others use decides what stays",
        mitigations=("with shares, each owner's blocks are compared with its own ones only", *mitigations),
    )


_SKETCH: Final = (
    "with shares, each owner has counters of its own, which end with its last block: nobody's accesses change another's",
    "counters are placed by a hash with a secret of the engine: nobody finds keys that share counters with another one",
)
_COUNTS: Final = "counters by hashes of prefix keys, without the keys"

DEFAULT_ADMISSION: Final = "auto"
TIER_ADMISSIONS: Registry[Callable[[int, bytes], TierAdmission]] = Registry("KV tier admission")
"""They take the slots of an owner, and 16 secret bytes."""
TIER_ADMISSIONS.register("always", _make_threat("order of the last uses"))(AdmitAll)
TIER_ADMISSIONS.register("tinylfu", _make_threat(_COUNTS, *_SKETCH))(TinyLFU)
TIER_ADMISSIONS.register("auto", _make_threat(f"{_COUNTS}, and a sample of the keys, which are hashes", *_SKETCH))(
    AdaptiveAdmission
)
