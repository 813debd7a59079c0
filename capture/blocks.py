"""Which KV blocks the requests hold, by slot, on the host."""

import numpy as np

from stepgraph.kernels.jit import compiled


@compiled
def _grow(slots, tokens, block_size, most, count, table, free, free_count, fresh):
    """Give every slot blocks for its tokens, up to its reservation; returns how many blocks were given."""
    new = 0
    for i in range(len(slots)):
        slot = slots[i]
        wanted = min(-(-tokens[i] // block_size), most[slot])
        while count[slot] < wanted:
            block = free[free_count - new - 1]
            fresh[0, new], fresh[1, new] = slot * table.shape[1] + count[slot], block
            table[slot, count[slot]] = block
            count[slot] += 1
            new += 1
    return new


class BlockTables:
    """Hands out the blocks of a pool; block 0 is the null block and no request's. A request reserves its worst case when
    it gets a slot and takes blocks as it grows, so that a running request never waits for memory.

    Attributes:
        capacity: blocks there are.
        count: `[num_slots]` blocks that each slot has taken; `table [num_slots, table_blocks]` names them, in order.
        most: `[num_slots]` blocks that each may take.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, table_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}; at least 2 are needed, since block 0 is the null block")
        self.block_size, self.capacity = block_size, num_blocks - 1
        self.table = np.zeros((num_slots, table_blocks), np.int64)
        self.count, self.most = np.zeros((2, num_slots), np.int64)
        self._free = np.arange(num_blocks - 1, 0, -1)  # a stack: the next one is last
        self._free_count = self.capacity
        self._new = np.empty((2, self.capacity), np.int64)

    @property
    def free(self) -> int:
        """Blocks that no slot has taken."""
        return self._free_count

    @property
    def available(self) -> int:
        """Blocks that a new request may reserve."""
        return self._free_count - int((self.most - self.count).sum())

    def reserve(self, slot: int, blocks: int) -> bool:
        """Promise blocks to the request that gets the slot; False when they are not there."""
        if blocks > self.available:
            return False
        self.most[slot] = blocks
        return True

    def grow(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Have blocks for the first `tokens[i]` tokens of slot `slots[i]`, or as many as it has reserved.

        Returns:
            `[2, n]`, valid until the next call: places in the flattened table that are new, and the blocks there.
        """
        new = _grow(slots, tokens, self.block_size, self.most, self.count, self.table, self._free, self._free_count, self._new)
        self._free_count -= new
        return self._new[:, :new]

    def release(self, slot: int) -> None:
        """Take back what a slot holds and what it has reserved."""
        count = int(self.count[slot])
        self._free[self._free_count : self._free_count + count] = self.table[slot, :count][::-1]
        self._free_count += count
        self.count[slot] = self.most[slot] = 0
