"""The native back end: C++ kernels for the instruction sets of a CPU; a step is one call. It needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cloister.backends.availability import why_no_kernels
from cloister.backends.factories import BACKENDS
from cloister.types.errors import ConfigError
from cloister.types.threat import ThreatProfile

if TYPE_CHECKING:
    from cloister.backends.base import Backend

_logger = logging.getLogger(__name__)

THREAT = ThreatProfile(
    row="paging, continuous batching, chunked prefill, TP, SP",
    residue="KV blocks until free; rows of a step until a later one overwrites them, or no sequence is left",
    where=("memory of the engine process",),
    attack="reuse of an unwiped block",
    mitigations=(
        "wipe on free, before the block can be given to another request",
        "wipe of the step's buffers when the last sequence departs",
    ),
)


def describe_missing_kernels(compiled: Sequence[str], runnable: Sequence[str]) -> str | None:
    """Says which kernels this processor would run if they had been compiled: the build was for another machine.

    Args:
        compiled: instruction sets that were compiled.
        runnable: those that this processor runs, best first.

    Returns:
        One sentence; None where the best that it runs was compiled.
    """
    used, best = next(name for name in runnable if name in compiled), runnable[0]
    if used == best:
        return None
    return f"computing with the kernels {used}; those for {best}, which this processor runs faster, were not compiled"


@BACKENDS.register("native", THREAT)
def make_native_backend(
    *,
    num_threads: int,
    device: str,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    numerics: str = "exact",
    store: Path | None = None,
    store_bytes: int | None = None,
    kernels: str | None = None,
) -> Backend:
    """Makes the native back end (`BackendFactory` says what the arguments mean).

    Args:
        kernels: an instruction set in place of the best that the processor has.

    Raises:
        ConfigError: the device is not a CPU, the type is unknown, or the kernels are not usable.
    """
    if (reason := why_no_kernels()) is not None:
        raise ConfigError(reason, param="backend")
    from cloister.backends.native import _native
    from cloister.backends.native.backend import NativeBackend  # loads the kernels: only when it was chosen
    from cloister.backends.native.store import MOST_BYTES, PackedStore

    missing = describe_missing_kernels(_native.compiled_names(), _native.runnable_names())
    if kernels is None and missing is not None:
        _logger.warning("%s; `cloister doctor` says what to do", missing)
    if numerics != "exact":
        raise ConfigError("the native back end is always exact; numerics fast needs a CUDA device", param="numerics")
    packed = None if store is None else PackedStore(store, MOST_BYTES if store_bytes is None else store_bytes)
    return NativeBackend(
        num_threads=num_threads, device=device, dtype=dtype or "bfloat16", kv_dtype=kv_dtype, store=packed, kernels=kernels
    )
