import pytest

from cloister.kv import BlockPool, BlockTable, OutOfBlocksError


def test_a_released_block_is_listed_for_wiping_before_it_can_be_given_away():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.release(blocks)
    assert sorted(pool.take_wipes()) == sorted(blocks)
    assert pool.take_wipes() == []


def test_a_double_free_is_refused():
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    pool.release([block])
    with pytest.raises(ValueError, match="more often than it was taken"):
        pool.release([block])


def test_a_free_block_cannot_be_shared():
    with pytest.raises(ValueError, match="is free"):
        BlockPool(4, 16).share([0])


def test_an_allocation_that_does_not_fit_takes_nothing():
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check()


def test_a_planted_leak_is_found_by_the_check():
    pool = BlockPool(4, 16)
    pool.allocate(1)
    pool._references[pool._free[0].popleft()] = 0
    with pytest.raises(AssertionError, match="leaked"):
        pool.check()


def test_a_planted_double_free_is_found_by_the_check():
    pool = BlockPool(4, 16)
    pool._free[0].append(0)
    with pytest.raises(AssertionError, match="free twice"):
        pool.check()


@pytest.mark.parametrize("block_size", [0, 257])
def test_block_sizes_outside_1_to_256_are_refused(block_size):
    with pytest.raises(ValueError, match="1 to 256"):
        BlockPool(4, block_size)


def test_a_fork_shares_blocks_and_the_first_to_write_gets_a_copy():
    pool = BlockPool(8, 4)
    parent = BlockTable(pool)
    parent.grow(0, 6)
    child = parent.fork()
    assert parent.blocks == child.blocks
    copies = child.grow(6, 7)
    assert copies == [(parent.blocks[1], child.blocks[1])]
    assert child.blocks[0] == parent.blocks[0]
    pool.release([source for source, _ in copies])
    assert parent.grow(6, 7) == [], "the last one left may write in place"
    parent.close()
    child.close()
    assert pool.num_free == 8
    pool.check()


def test_growing_without_enough_blocks_leaves_the_table_as_it_was():
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    table.grow(0, 4)
    before = list(table.blocks)
    with pytest.raises(OutOfBlocksError):
        table.grow(4, 16)
    assert table.blocks == before
    assert pool.references(before[0])


def test_blocks_that_nobody_took_yet_stay_untouched_while_others_are_free():
    pool = BlockPool(8, 16)
    touched = set()
    for _ in range(5):
        blocks = pool.allocate(2)
        touched.update(blocks)
        pool.release(blocks)
    assert len(touched) == 2
