"""The torch back end: the oracle on a CPU, and CUDA. It is registered without importing torch."""

from __future__ import annotations

from cloister.backends.base import BACKENDS, Backend
from cloister.types.threat import ThreatProfile

THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV blocks until free",
    where=("device memory",),
    attack="reuse of an unwiped block",
    mitigations=("wipe on free, before the block can be given to another request",),
)


@BACKENDS.register("torch", THREAT)
def make_torch_backend(*, num_threads: int, device: str, dtype: str) -> Backend:
    """Makes the torch back end (`BackendFactory` says what the arguments mean).

    Raises:
        ConfigError: the device is not there, or a setting is not one of those listed.
    """
    from cloister.backends.torch.backend import TorchBackend  # torch takes a second to import: only when it was chosen

    return TorchBackend(num_threads=num_threads, device=device, dtype=dtype)
