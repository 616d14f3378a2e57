"""The native back end: C++ kernels for the instruction sets of a CPU; a step is one call. It needs no torch."""

from __future__ import annotations

from cloister.backends.base import BACKENDS, Backend
from cloister.types.threat import ThreatProfile

THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV blocks until free; rows of the last step until the next one overwrites them",
    where=("memory of the engine process",),
    attack="reuse of an unwiped block",
    mitigations=("wipe on free, before the block can be given to another request",),
)


@BACKENDS.register("native", THREAT)
def make_native_backend(*, num_threads: int, device: str, dtype: str) -> Backend:
    """Makes the native back end (`BackendFactory` says what the arguments mean).

    Raises:
        ConfigError: the device is not a CPU, the type is unknown, or the kernels were not compiled.
    """
    from cloister.backends.native.backend import NativeBackend  # loads the kernels: only when it was chosen

    return NativeBackend(num_threads=num_threads, device=device, dtype=dtype)
