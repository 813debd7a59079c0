"""Which graphs a requested mode comes to, given what each component can be captured for.

The names are those of serving engines (vLLM's `cudagraph_mode`), so that a configuration can be read here, and its outcome
compared: `runner="v1"` answers as those engines did before graphs for every query length, `"v2"` as stepgraph does.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import lcm

from stepgraph.capture.keys import MAX_BATCH, GraphKey, KeySet, default_rungs, reachable_keys
from stepgraph.capture.schedule import DEFAULT_MAX_K, Schedule, require_int
from stepgraph.kernels.support import CaptureSupport

TARGET = "target"
RUNNERS = ("v1", "v2")
# vLLM's default capture sizes, in tokens, up to 1,024.
ENGINE_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16))


class CaptureMode(StrEnum):
    """What a user may ask for: how decode steps, and how batches with prefill chunks, are run.

    | mode | decode | with prefill |
    |---|---|---|
    | NONE | no graph | no graph |
    | PIECEWISE | piecewise | piecewise |
    | FULL | full | full |
    | FULL_DECODE_ONLY | full | no graph |
    | FULL_AND_PIECEWISE | full | piecewise |
    """

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def parts(self) -> tuple["CaptureMode", "CaptureMode"]:
        """(decode, prefill), each NONE, PIECEWISE or FULL."""
        none, piecewise, full = CaptureMode.NONE, CaptureMode.PIECEWISE, CaptureMode.FULL
        return {
            CaptureMode.FULL_DECODE_ONLY: (full, none),
            CaptureMode.FULL_AND_PIECEWISE: (full, piecewise),
        }.get(self, (self, self))


@dataclass(frozen=True)
class ComponentCapture:
    """What one component gets.

    Attributes:
        name: "target", or a drafter's.
        decode: k → NONE, PIECEWISE or FULL.
        prefill: NONE, PIECEWISE or FULL.
        full_keys, piecewise_keys: graphs by (batch, k) of each kind.
        prefill_sizes: prefill chunk sizes with a graph, in tokens.
        reasons: one sentence for each way in which less was given than asked for.
    """

    name: str
    decode: Mapping[int, CaptureMode]
    prefill: CaptureMode
    full_keys: KeySet
    piecewise_keys: KeySet
    prefill_sizes: tuple[int, ...]
    reasons: tuple[str, ...]

    def lookup(self, batch: int, k: int) -> tuple[CaptureMode, GraphKey | None]:
        """The best graph for a decode step of `batch` requests: (FULL or PIECEWISE, its key), or (NONE, None)."""
        for mode, keys in ((CaptureMode.FULL, self.full_keys), (CaptureMode.PIECEWISE, self.piecewise_keys)):
            if (key := keys.lookup(batch, k)) is not None:
                return mode, key
        return CaptureMode.NONE, None

    def lookup_tokens(self, num_tokens: int, k: int) -> tuple[CaptureMode, GraphKey | None]:
        """The same for a decode step of `num_tokens` query tokens. A count that is no multiple of k + 1 is no uniform batch:
        it selects no graph, and no request is invented to fill it up.
        """
        batch, rest = divmod(num_tokens, k + 1)
        return (CaptureMode.NONE, None) if rest or not batch else self.lookup(batch, k)


@dataclass(frozen=True)
class ResolvedCapture:
    """The outcome for every component.

    Attributes:
        requested: as asked for.
        runner: "v1" or "v2".
        components: by name.
    """

    requested: CaptureMode
    runner: str
    components: Mapping[str, ComponentCapture]

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(reason for component in self.components.values() for reason in component.reasons)

    def slower_batches(self, schedule: Schedule | None, k_max: int, max_batch: int) -> int:
        """Batch sizes in 1..max_batch that reach no FULL graph of the target at some k they may run at."""
        target = self.components[TARGET]
        reach = _reach(schedule, k_max, max_batch)
        return sum(any(target.full_keys.lookup(n, k) is None for k in ks) for n, ks in reach.items())


def resolve_capture_mode_and_sizes(
    requested_mode: CaptureMode | str,
    support: Mapping[str, CaptureSupport],
    schedule: Schedule | None,
    k_max: int,
    max_batch: int,
    decode_sizes: Sequence[int] | None = None,
    prefill_sizes: Sequence[int] = (),
    tensor_parallel_size: int = 1,
    runner: str = "v2",
) -> ResolvedCapture:
    """Resolve a requested mode into graphs per component. Pure: the same arguments give the same answer, nothing is captured.

    Args:
        requested_mode: a `CaptureMode` or its name.
        support: component → what it can be captured for; "target" must be among them. Components are resolved on their own:
            a weak drafter never takes a graph from the target.
        schedule: which k each batch size runs at; None means that any k in 0..k_max may run at any batch size.
        k_max: largest k, in draft tokens.
        max_batch: most decoding requests.
        decode_sizes: v2: bucket sizes in requests, `default_rungs` if None, and the largest batch of each k is always one.
            v1: sizes in tokens, `ENGINE_SIZES` if None.
        prefill_sizes: prefill chunk sizes in tokens; independent of the decode sizes.
        tensor_parallel_size: ranks. In v1 token counts are rounded to its multiples too, as sequence parallelism shards them;
            v2 shards no rows, so there it changes nothing.
        runner: "v2"; or "v1", the baseline: full graphs for the largest query length alone, at token counts rounded up to
            its multiples, and PIECEWISE wherever k may change.

    Raises:
        ValueError: an argument that cannot be, named with its value and what is allowed.
    """
    requested = _member(CaptureMode, "requested_mode", requested_mode)
    if runner not in RUNNERS:
        raise ValueError(f"runner is {runner!r}; allowed are {', '.join(RUNNERS)}.")
    require_int("k_max", k_max, 0, DEFAULT_MAX_K)
    require_int("max_batch", max_batch, 1, MAX_BATCH)
    require_int("tensor_parallel_size", tensor_parallel_size, 1)
    if not isinstance(support, Mapping) or TARGET not in support:
        raise ValueError(f"support is {support!r}; it must map components to CaptureSupport and have {TARGET!r}.")
    if schedule is not None and max(schedule.ks(max_batch)) > k_max:
        raise ValueError(f"the schedule asks for k={max(schedule.ks(max_batch))}; k_max is {k_max}.")
    decode_sizes = None if decode_sizes is None else _sizes("decode_sizes", decode_sizes)
    prefill_sizes = _sizes("prefill_sizes", prefill_sizes)

    reach = _reach(schedule, k_max, max_batch)
    ks = frozenset(k for each in reach.values() for k in each)
    if runner == "v1":
        keys = _engine_keys(max(ks), max_batch, decode_sizes or ENGINE_SIZES, tensor_parallel_size)
    else:
        keys = reachable_keys(reach, max_batch, decode_sizes or default_rungs(max_batch))
    components = {
        name: _resolve_component(
            name, _member(CaptureSupport, f"support[{name!r}]", has), requested, ks, keys, prefill_sizes, runner
        )
        for name, has in support.items()
    }
    return ResolvedCapture(requested, runner, components)


def _resolve_component(
    name: str,
    support: CaptureSupport,
    requested: CaptureMode,
    ks: frozenset[int],
    keys: KeySet,
    prefill_sizes: tuple[int, ...],
    runner: str,
) -> ComponentCapture:
    wanted, prefill = requested.parts
    none, piecewise, full = CaptureMode.NONE, CaptureMode.PIECEWISE, CaptureMode.FULL
    # FULL_DECODE_ONLY asks for no compiled pieces, so it has none to fall back to.
    fallback = none if requested is CaptureMode.FULL_DECODE_ONLY else piecewise
    reasons, decode = [], dict.fromkeys(sorted(ks), wanted)
    if wanted is full:
        refusals: dict[str, list[int]] = {}
        for k in decode:
            why = _refusal(name, support, k, ks, runner)
            if why is not None:
                decode[k] = fallback
                refusals.setdefault(why, []).append(k)
        for why, refused in refusals.items():
            which = "every k" if len(refused) == len(ks) else f"k = {', '.join(map(str, refused))}"
            reasons.append(f"{name}: decode at {which} is {fallback} instead of FULL, since {why}")
    if prefill is full and support is not CaptureSupport.ALWAYS:
        prefill = piecewise
        reasons.append(f"{name}: prefill is PIECEWISE instead of FULL, since its support is {support.name}, not ALWAYS")

    def of_kind(mode: CaptureMode) -> KeySet:
        return KeySet(key for key in keys if decode.get(key.k) is mode)

    pieces = of_kind(piecewise)
    if runner == "v1" and piecewise in decode.values():
        # Pieces know tokens, not requests: whatever the query length, a uniform batch runs in them up to the largest size.
        tokens = {key.batch * key.query_len for key in keys}
        pieces = KeySet(GraphKey(size // (k + 1), k) for size in tokens for k in ks if size > k and decode[k] is piecewise)
    prefill_sizes = () if prefill is none else prefill_sizes
    return ComponentCapture(name, decode, prefill, of_kind(full), pieces, prefill_sizes, tuple(reasons))


def _refusal(name: str, support: CaptureSupport, k: int, ks: frozenset[int], runner: str) -> str | None:
    """Why decode at this k cannot be a full graph."""
    if runner == "v1" and len(ks) > 1:
        return f"k may change (it takes {', '.join(map(str, sorted(ks)))}) and v1 has graphs for one query length"
    if support is CaptureSupport.NEVER:
        return "its support is NEVER"
    if support is CaptureSupport.UNIFORM_SINGLE_TOKEN and k > 0:
        return "its support is UNIFORM_SINGLE_TOKEN and the query has more than one token"
    return None


def _engine_keys(k_max: int, max_batch: int, sizes: Sequence[int], tensor_parallel_size: int) -> KeySet:
    """v1: token counts rounded up to multiples of the query length, hence whole requests, and none beyond the largest size."""
    multiple = lcm(k_max + 1, tensor_parallel_size)
    rounded = {-(-size // multiple) * multiple for size in sizes}
    buckets = sorted(tokens // (k_max + 1) for tokens in rounded if tokens <= max(sizes))
    return KeySet(GraphKey(batch, k_max) for batch in buckets[: bisect_left(buckets, max_batch) + 1])


def _reach(schedule: Schedule | None, k_max: int, max_batch: int) -> dict[int, frozenset[int]]:
    if schedule is None:
        return {n: frozenset(range(k_max + 1)) for n in range(1, max_batch + 1)}
    return {n: frozenset([schedule.k_for(n)]) for n in range(1, max_batch + 1)}


def _sizes(name: str, sizes: Sequence[int]) -> tuple[int, ...]:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ValueError(f"{name} is {sizes!r}; it must be a sequence of integers from 1.")
    return tuple(sorted({require_int(f"an entry of {name}", size, 1) for size in sizes}))


def _member(kind: type, name: str, value: object):
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(member.name for member in kind)
        raise ValueError(f"{name} is {value!r}; allowed are {allowed}.") from None
