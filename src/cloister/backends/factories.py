"""The registry of back ends. It knows what makes each, and imports nothing of what they compute with: a front reads it too."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from cloister.types.registry import Registry

if TYPE_CHECKING:
    from cloister.backends.base import Backend


class BackendFactory(Protocol):
    """Makes a back end; called once, after its name was chosen.

    Args:
        num_threads: threads for arithmetic.
        device: "cpu" or "cuda".
        dtype: "float32" or "bfloat16", of weights that come as numbers, and of activations; None for what suits it best.
        kv_dtype: of KV, one of "float32", "bfloat16", "int8", "int4"; None for `dtype`.
        store: directory in which it may keep what it made of weights; None keeps nothing.
        store_bytes: what that may take.
    """

    def __call__(
        self,
        *,
        num_threads: int,
        device: str,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        numerics: str = "exact",
        store: Path | None = None,
        store_bytes: int | None = None,
    ) -> Backend: ...


FOREIGN_FAMILY: Final = "transformers"
"""The family of a model without a spec, of which no layers are known, and the back end that computes it."""
BACKENDS: Registry[BackendFactory] = Registry("back end")
