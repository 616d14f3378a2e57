"""Buffers are used again when nothing refers to them, and never before."""

from __future__ import annotations

import mmap
import random
import resource
import threading

import numpy as np
import pytest

from cloister.engine.buffer_pool import BufferPool


def test_memory_is_used_again_when_all_parts_of_a_buffer_are_gone() -> None:
    pool = BufferPool(2**20)
    room = pool.take(1000)
    assert len(room) == 1000
    first, second = room[:500], np.frombuffer(room[500:], np.uint8)
    room[:] = bytes([7]) * 1000
    del room
    assert pool.take(1000)[0] == 0, "it was given away while parts of it were in use"
    del first
    assert second.tolist() == [7] * 500
    del second
    assert bytes(pool.take(1000)) == bytes([7]) * 1000, "it was not used again"


def test_a_pool_keeps_no_more_than_it_may_and_nothing_when_it_is_closed() -> None:
    pool = BufferPool(2**19)
    buffers = [pool.take(2**18) for _ in range(3)]
    for number, buffer in enumerate(buffers, 1):
        buffer[:1] = bytes([number])
    buffers.clear()
    taken = [pool.take(2**18) for _ in range(3)]
    assert sum(buffer[0] > 0 for buffer in taken) == 2
    pool.close()
    taken.clear()
    assert pool.take(2**18)[0] == 0


def test_no_two_threads_have_the_same_memory() -> None:
    pool, wrong = BufferPool(2**20), list[int]()

    def use(number: int) -> None:
        draw = random.Random(number)
        for _ in range(300):
            size = draw.randrange(1, 2**19)
            buffer = pool.take(size)
            buffer[:] = bytes([number]) * size
            if bytes(buffer[:64]) != bytes([number]) * min(64, size) or buffer[-1] != number:
                wrong.append(number)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not wrong


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="this system clears pages when they are touched")
def test_new_memory_is_cleared_at_once_and_not_page_by_page() -> None:
    buffer = np.frombuffer(BufferPool(0).take(2**22), np.uint8)
    num_faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert not buffer.any()
    buffer[:] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - num_faults < 2**22 / mmap.PAGESIZE / 10
