"""Where the published figures of a serving engine come from: 56 sizes, 242 full graphs, 86 of 256 batch sizes without one.

The engine (vLLM's model runner V2 after PR 45953 and PR 50488) captures the target at sizes counted in tokens. For each query
length of the schedule there is a full graph at every size rounded up to a multiple of it, and at every size one in pieces. A
step looks only under the next larger number of tokens that any graph was captured for (described in vLLM PR 56136); when the
full graphs there are of other query lengths, it takes the pieces, though a full graph of its own is a few tokens further up.
"""

from bisect import bisect_left
from collections import Counter
from itertools import product

from stepgraph.capture.keys import reachable_keys
from stepgraph.capture.schedule import Schedule

PUBLISHED = Schedule.parse([[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]])
MAX_BATCH, LARGEST = 256, 512
PIECES = "pieces"


def engine_sizes() -> list[int]:
    """1, 2, 4, by 8 to 256, by 16 to 512 tokens, and so many requests of each query length as far as its batches go."""
    grid = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST + 1, 16)]
    requests = {(k + 1) * n for _, last, k in PUBLISHED.ranges(MAX_BATCH) for n in grid if n <= last}
    return sorted({*grid, *requests})


def engine_graphs() -> dict[int, set]:
    """Tokens → query lengths that have a full graph of so many tokens, and PIECES."""
    graphs = {size: {PIECES} for size in engine_sizes()}
    for size, k in product(engine_sizes(), PUBLISHED.ks(MAX_BATCH)):
        rounded = -(-size // (k + 1)) * (k + 1)
        if rounded <= min(LARGEST, MAX_BATCH * (k + 1)):
            graphs.setdefault(rounded, set()).add(k + 1)
    return graphs


def test_the_published_figures():
    graphs = engine_graphs()
    assert sum(PIECES in found for found in graphs.values()) == len(engine_sizes()) == 56
    assert sum(len(found - {PIECES}) for found in graphs.values()) == 242
    tokens = sorted(graphs)
    slower = [
        n
        for n in range(1, MAX_BATCH + 1)
        if (query_len := PUBLISHED.k_for(n) + 1) not in graphs[tokens[bisect_left(tokens, n * query_len)]]
    ]
    assert len(slower) == 86
    assert Counter(PUBLISHED.k_for(n) for n in slower) == {5: 3, 4: 6, 3: 8, 1: 22, 0: 47}


def test_ladders_for_each_k_need_36_graphs_and_leave_none_slower():
    keys = reachable_keys(PUBLISHED, MAX_BATCH)
    assert len(keys) == 36
    assert all(keys.lookup(n, PUBLISHED.k_for(n)) for n in range(1, MAX_BATCH + 1))
