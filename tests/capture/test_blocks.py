"""KV blocks by slot: nobody is given another's block, and nobody more than was promised."""

import numpy as np
import pytest

from stepgraph.capture.blocks import BlockTables


@pytest.mark.parametrize("seed", range(4))
def test_blocks_belong_to_one_slot_and_come_back(seed):
    rng = np.random.default_rng(seed)
    tables, width, block_size = BlockTables(20, 4, 5, 8), 8, 4
    device = np.zeros(5 * width, np.int64)
    for _ in range(300):
        slot = int(rng.integers(5))
        if tables.most[slot]:
            if rng.random() < 0.3:
                tables.release(slot)
        else:
            promised, before = int(rng.integers(1, 9)), tables.available
            assert tables.reserve(slot, promised) == (promised <= before)
        slots = np.flatnonzero(tables.most)
        tokens = rng.integers(0, 40, len(slots))
        before = tables.count.copy()
        cells, blocks = tables.grow(slots, tokens)
        device[cells] = blocks
        wanted = np.minimum(-(-tokens // block_size), tables.most[slots])
        assert (tables.count[slots] == np.maximum(before[slots], wanted)).all()
        held = [block for slot in slots for block in tables.table[slot, : tables.count[slot]].tolist()]
        assert len(set(held)) == len(held) == tables.capacity - tables.free
        assert all(1 <= block <= 19 for block in held)
        assert tables.available == tables.free - int((tables.most - tables.count).sum()) >= 0
        for slot in slots:
            count = tables.count[slot]
            assert (device[slot * width : slot * width + count] == tables.table[slot, :count]).all()
    for slot in range(5):
        tables.release(slot)
    assert tables.available == tables.free == tables.capacity == 19


def test_the_null_block_alone_is_no_pool():
    with pytest.raises(ValueError, match="num_blocks=1; at least 2 are needed"):
        BlockTables(1, 4, 1, 1)
