"""Triton kernels of the CUDA program, one idea per file. Importing this package imports neither torch nor triton.

Every kernel sums in an order that a row's own data decide: tiles change which rows are computed together, never how
(batch invariance). `EXACT` is passed to each launch: without fused multiply-add, two kernels that compile the same expression
cannot round it differently.
"""

from __future__ import annotations

from typing import Any, Final

EXACT: Final[dict[str, Any]] = {"enable_fp_fusion": False}
"""Launch option of every kernel whose bits matter."""
