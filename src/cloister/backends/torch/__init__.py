"""The torch back end: the reference on CPUs, and CUDA. It is registered without importing torch."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.backends.availability import load_torch
from cloister.backends.factories import BACKENDS, FOREIGN_FAMILY, BackendFactory
from cloister.types.threat import ThreatProfile

if TYPE_CHECKING:
    from cloister.backends.base import Backend

THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV blocks until free; rows of a step and of an image tower until their memory is used again",
    where=("device memory",),
    attack="reuse of an unwiped block",
    mitigations=("wipe on free, before the block can be given to another request",),
)


def _make_factory(module: str, backend: str) -> BackendFactory:
    """Returns what makes a back end of a module that is imported only when it was chosen: torch takes a second."""

    def make(
        *,
        num_threads: int,
        device: str,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        numerics: str = "exact",
        store: Path | None = None,  # noqa: ARG001 - it keeps nothing
        store_bytes: int | None = None,  # noqa: ARG001
    ) -> Backend:
        """Makes the back end (`BackendFactory` says what the arguments mean).

        Raises:
            ConfigError: the device is not there, or a setting is not one of those listed.
        """
        load_torch(device)
        kind = getattr(import_module(f"cloister.backends.torch.{module}"), backend)
        dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
        made: Backend = kind(num_threads=num_threads, device=device, dtype=dtype, numerics=numerics, kv_dtype=kv_dtype)
        return made

    return make


BACKENDS.register("torch", THREAT)(_make_factory("backend", "TorchBackend"))
BACKENDS.register(FOREIGN_FAMILY, THREAT)(_make_factory("fallback", "FallbackBackend"))
