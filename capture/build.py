"""From names and sizes to a running engine."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from stepgraph.capture.engine import MAX_LAG, Engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.modes import Mode
from stepgraph.capture.policies import KPolicy, make_adaptive, make_policy
from stepgraph.capture.request import require_verify
from stepgraph.capture.schedule import Schedule, require_int
from stepgraph.capture.state import DecodeState
from stepgraph.capture.step import SpeculativeStep
from stepgraph.model.checkpoint import LoadedModel, load_model
from stepgraph.model.drafters import DrafterSpec, EarlyStop, default_drafter, load_draft_weights, make_drafter
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.kv_cache import PagedKV, block_bytes
from stepgraph.model.quantize import INT8, WEIGHTS, is_int8, quantize_int8
from stepgraph.model.transformer import Transformer, pack_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
AUTO = "auto"
DEFAULT_MAX_LEN = 2048
DEFAULT_K = 3
# Rows of a few requests cost little beside the reading of the weights; with more, each draft has to earn its products. On two
# cores hybrid did best so, of k = 0 to 3 at batch 1 to 16; without a drafter, batch 16 is faster still in bfloat16 and int8.
CPU_SCHEDULE = [[1, 2, 3], [3, 4096, 1]]


@dataclass(frozen=True)
class EngineOptions:
    """Everything that shapes an engine.

    Attributes:
        model: see `stepgraph.model.checkpoint.load_model`.
        drafter: see `stepgraph.model.drafters.spec.KNOWN`; None is "none" at k = 0 and the model's
            `default_drafter` otherwise; the name is then here.
        k: drafts per step; None (with no schedule) is 0 without a drafter, 3 on CUDA and `CPU_SCHEDULE` on a CPU.
        schedule: `[[first batch, last batch, k], …]`, JSON text or a path, instead of k.
        policy: a policy that learns (`stepgraph.capture.policies.ADAPTIVE`), instead of both.
        policy_options: its options by name.
        early_stop: rows stop drafting before k by this rule (`stepgraph.model.drafters.early_stop.KNOWN`); None never.
        max_batch: most requests decoding at once.
        max_len: most tokens of a request, prompt included; None is 2048 or the model's own maximum, whichever is less.
        block_size: tokens in a KV block.
        kv_memory_bytes: budget of all KV caches; no more is taken than `max_batch` requests of `max_len` can use.
        dtype: float32, bfloat16, float16 or float64; "auto" is bfloat16 where the device has its products, else float32.
        weights: "int8" rounds what the models multiply with to 8 bits (`stepgraph.model.quantize`), on the CPU; None, the
            default, leaves weights as they are.
        device: None is "cuda" where there is one, else "cpu".
        mode: FULL, THREE_GRAPH, PIECEWISE or EAGER (`stepgraph.capture.modes.Mode`).
        strict: a step without a graph is an error instead of an eager step.
        prefill_chunk: most prompt tokens run between two steps.
        seed: request i without a seed of its own gets `seed + i`.
        verify: "standard" or "block" verification, for requests that do not say; both are lossless.
        synthetic_rates: see `Engine`; not lossless, for timing only.
        lag: steps in flight when the next one is launched; see `Engine`.
        invariant_linear: matrix products whose row bits do not depend on the number of rows; compiled ones of a CPU never do,
            but with AMX many rows of bfloat16 are PyTorch's.
    """

    model: str = "smollm2-135m"
    drafter: str | None = None
    k: int | None = None
    schedule: Schedule | str | list | dict | None = None
    policy: str | None = None
    policy_options: dict[str, Any] | None = None
    early_stop: str | None = None
    max_batch: int = 8
    max_len: int | None = None
    block_size: int = 16
    kv_memory_bytes: int = 1 << 30
    dtype: str = "float32"
    weights: str | None = None
    device: str | None = None
    mode: str = Mode.FULL
    strict: bool = False
    prefill_chunk: int = 256
    seed: int = 0
    verify: str = "standard"
    synthetic_rates: tuple[float, ...] | None = None
    invariant_linear: bool = False
    lag: int | None = None

    def __post_init__(self):
        if self.drafter is None:
            plain = self.k == 0 and self.schedule is None and self.policy is None
            object.__setattr__(self, "drafter", "none" if plain else default_drafter(self.model))
        require_int("max_batch", self.max_batch, 1, 4096)
        require_int("block_size", self.block_size, 1, 1024)
        require_int("prefill_chunk", self.prefill_chunk, 1)
        require_int("kv_memory_bytes", self.kv_memory_bytes, 1)
        require_int("seed", self.seed, 0, 2**62)
        if self.lag is not None:
            require_int("lag", self.lag, 0, MAX_LAG)
        if self.max_len is not None:
            require_int("max_len", self.max_len, 2)
        if self.early_stop is not None:
            EarlyStop.parse(self.early_stop)
        DrafterSpec.parse(self.drafter)
        named = isinstance(self.device, str) and re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device)
        if self.device is not None and not named:
            raise ValueError(f"device is {self.device!r}; allowed are cpu, cuda and cuda:N")
        if (self.device or "").startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}; this machine or this build of torch has no CUDA")
        if self.dtype == AUTO:
            object.__setattr__(self, "dtype", _fast_dtype(_device(self)))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; allowed are {', '.join(DTYPES)}, and {AUTO}")
        if self.weights is not None:
            require_weights(self.weights, self.dtype, self.device)
        require_verify(self.verify)
        if self.synthetic_rates is not None and self.drafter == "none":
            raise ValueError("synthetic_rates needs a drafter whose drafts it can accept; drafter is 'none'")
        if self.mode not in list(Mode):
            raise ValueError(f"mode is {self.mode!r}; allowed are {', '.join(Mode)}")

    def make_policy(self) -> KPolicy:
        """The policy that these options ask for."""
        if self.policy is not None:
            if self.k is not None or self.schedule is not None:
                raise ValueError(f"policy is {self.policy!r}, and k or a schedule was given too; give one of them")
            return make_adaptive(self.policy, self.policy_options)
        if self.policy_options is not None:
            raise ValueError("policy_options were given without a policy")
        if self.k is not None or self.schedule is not None:
            return make_policy(self.k, self.schedule)
        if self.drafter == "none":
            return make_policy(0)
        return make_policy(schedule=CPU_SCHEDULE) if _device(self) == "cpu" else make_policy(DEFAULT_K)


def _device(options: EngineOptions) -> str:
    on_cuda = torch.cuda.is_available() and options.weights is None
    return options.device or ("cuda" if on_cuda else "cpu")


def _fast_dtype(device: str) -> str:
    if device == "cpu":
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if fast else "float32"


class BuiltEngine(NamedTuple):
    """An engine, the target's name, and the seconds its loading took."""

    engine: Engine
    name: str
    load_s: float


def load_target(options: EngineOptions) -> LoadedModel:
    """The model of the options, in their dtype and on their device."""
    loaded = load_model(
        options.model,
        dtype=DTYPES[options.dtype],
        device=_device(options),
        invariant_linear=options.invariant_linear,
    )
    if options.weights == INT8:
        quantize_int8(loaded.model)
    return loaded


def require_weights(weights: str, dtype: str, device: str | None) -> None:
    """Raise a ValueError for weights that there are not, or not with these."""
    if weights not in WEIGHTS:
        raise ValueError(f"weights is {weights!r}; allowed are {', '.join(WEIGHTS)}, and None for weights of the dtype")
    if (device or "cpu") != "cpu":
        raise ValueError(f"weights is {weights!r} on device {device!r}; int8 weights have kernels on the CPU alone")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"weights is {weights!r} with dtype {dtype!r}; int8 weights go with float32 and bfloat16")


def build_engine(
    options: EngineOptions,
    loaded: LoadedModel | None = None,
    draft_weights: Transformer | Eagle3Head | None = None,
) -> BuiltEngine:
    """An engine that is ready for `add`, `step` and `generate`; graphs are captured at the first step or by `capture`.

    Args:
        options: sizes and names.
        loaded: the target, if it is loaded already (its dtype, weights and device then count); several engines may share it.
        draft_weights: the draft model or head of the drafter, if it is there already.

    Raises:
        ValueError: an option that cannot be, named with its value and what is allowed.
    """
    policy = options.make_policy()  # before anything is loaded: a wrong option should not cost a model load
    if loaded is None:
        loaded = load_target(options)
    target = loaded.model
    max_len = min(DEFAULT_MAX_LEN, target.max_positions) if options.max_len is None else options.max_len
    if max_len > target.max_positions:
        raise ValueError(f"max_len is {max_len}; {loaded.name} has positions for {target.max_positions} tokens")

    spec = DrafterSpec.parse(options.drafter)
    if draft_weights is None:
        draft_weights = load_draft_weights(spec, target, loaded.name)
    if draft_weights is not None and is_int8(target) and not is_int8(draft_weights):
        quantize_int8(draft_weights)
    models = [model for model in (target, draft_weights) if model is not None]
    for model in models:
        pack_weights(model)
    num_blocks = _num_blocks(options, max_len, models)
    kv = PagedKV(target.config, num_blocks=num_blocks, block_size=options.block_size, dtype=target.dtype, device=target.device)
    early_stop = None if options.early_stop is None else EarlyStop.parse(options.early_stop)
    drafter = make_drafter(spec, target, kv, draft_weights, options.max_batch, early_stop)
    state = DecodeState(
        num_slots=options.max_batch,
        max_len=max_len,
        block_size=options.block_size,
        k_max=max(policy.ks),
        device=target.device,
    )
    step = SpeculativeStep(target, kv, state, drafter)
    graphs = StepGraphs(step, policy.keys(options.max_batch), mode=options.mode, strict=options.strict)
    tokenizer = loaded.tokenizer
    engine = Engine(
        graphs,
        policy,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids if tokenizer else target.config.eos_token_ids,
        prefill_chunk=options.prefill_chunk,
        seed=options.seed,
        verify=options.verify,
        synthetic_rates=options.synthetic_rates,
        lag=options.lag,
    )
    return BuiltEngine(engine, loaded.name, loaded.load_s)


def _num_blocks(options: EngineOptions, max_len: int, models: list[Transformer | Eagle3Head]) -> int:
    """Blocks of the pool, the null block included."""
    each = sum(block_bytes(model.config, options.block_size, model.dtype) for model in models)
    affordable = options.kv_memory_bytes // each
    if affordable < 2:
        raise ValueError(
            f"kv_memory_bytes is {options.kv_memory_bytes}; a block of {options.block_size} tokens takes {each}, and at least "
            "2 blocks are needed"
        )
    return min(1 + options.max_batch * -(-max_len // options.block_size), affordable)
