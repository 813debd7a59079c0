"""Greedy text of the embedded model by us and by others: same weights, prompts and token counts, in turns in one process.

Every provider answers a prompt before any answers the next, in another order each time, so that what else the machine does
falls on all of them alike. A speed-up is the median over prompts of a provider's rate over that of transformers' plain decoding
for the same prompt. Rates take in the prompt's prefill, whoever computes it.
"""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median, quantiles

import torch

from stepgraph.capture.build import DTYPES, EngineOptions, build_engine
from stepgraph.capture.experiments.llama_cpp import llama_cpp_generate
from stepgraph.capture.experiments.prompt_sets import load_prompts, spread
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.prompts import encode_prompt
from stepgraph.capture.request import SamplingParams
from stepgraph.model.checkpoint import CheckpointError, LoadedModel, load_model
from stepgraph.model.transformer import Transformer

MODEL = "smollm2-135m"
LLAMA_CPP = "llama.cpp-q4_1"  # its weights, whatever the dtype of the others
PROVIDERS = (
    "transformers", "transformers-lookup", "transformers-assisted", LLAMA_CPP, "ours", "ours-ngram", "ours-eagle3",
    "ours-hybrid",
)  # fmt: skip
BASELINE = "transformers"
K = 3
# No smaller model of the family comes with a package; transformers can assist itself with its own first layers.
ASSISTING_LAYERS = 20
THEIR_OPTIONS = {
    "transformers": {},
    "transformers-lookup": {"prompt_lookup_num_tokens": K},
    "transformers-assisted": {
        "assistant_early_exit": ASSISTING_LAYERS, "num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
}  # fmt: skip

# Prompt ids, number of new tokens -> the new tokens.
Generate = Callable[[list[int], int], list[int]]


@dataclass
class Run:
    """What one provider did: seconds and tokens of each prompt."""

    generate: Generate
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    def rates(self) -> list[float]:
        return [len(tokens) / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]


def hugging_face(model: Transformer) -> torch.nn.Module:
    """The transformers model with these weights, taken apart again; Llama family, no bias."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
            eos_token_id=None,
            bos_token_id=None,
        )
    ).to(model.dtype)
    heads = [config.num_heads * config.head_dim] + [config.num_kv_heads * config.head_dim] * 2
    weights = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    for i, layer in enumerate(model.layers):
        at = f"model.layers.{i}"
        parts = layer.qkv_weight.split(heads) + layer.gate_up_weight.chunk(2)
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        weights |= {f"{at}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
        weights |= {
            f"{at}.self_attn.o_proj.weight": layer.o_weight,
            f"{at}.mlp.down_proj.weight": layer.down_weight,
            f"{at}.input_layernorm.weight": layer.input_norm,
            f"{at}.post_attention_layernorm.weight": layer.post_norm,
        }
    weights["lm_head.weight"] = model.embed if model.lm_head is None else model.lm_head
    theirs.load_state_dict(weights)
    return theirs.eval()


def their_generate(theirs: torch.nn.Module, **options) -> Generate:
    def generate(ids: list[int], new: int) -> list[int]:
        inputs = torch.tensor([ids])
        with torch.no_grad():
            out = theirs.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new, do_sample=False, pad_token_id=0, **options
            )
        return out[0, len(ids) :].tolist()

    return generate


def _ours(loaded: LoadedModel, drafter: str, max_len: int) -> Generate:
    k = 0 if drafter == "none" else K
    engine = build_engine(EngineOptions(MODEL, drafter, k=k, max_batch=1, max_len=max_len), loaded).engine
    engine.graphs.capture()  # done once in an engine's life

    def generate(ids: list[int], new: int) -> list[int]:
        return engine.generate([ids], SamplingParams(max_new_tokens=new, ignore_eos=True))[0].token_ids

    return generate


def providers(loaded: LoadedModel, max_len: int) -> Iterator[tuple[str, Generate | str]]:
    """Name and function of each provider, or why it is absent."""
    theirs = hugging_face(loaded.model) if find_spec("transformers") else None
    for name in PROVIDERS:
        if name in THEIR_OPTIONS:
            yield name, "transformers is not installed" if theirs is None else their_generate(theirs, **THEIR_OPTIONS[name])
        elif name == LLAMA_CPP:
            yield name, llama_cpp_generate(MODEL, max_len) if find_spec("llama_cpp") else "llama-cpp-python is not installed"
        else:
            try:
                yield name, _ours(loaded, name.partition("-")[2] or "none", max_len)
            except CheckpointError as error:
                yield name, str(error)


def peer_rows(dtype: str, prompts: int, new_tokens: int) -> Iterator[dict]:
    """A row for each provider.

    Args:
        dtype: of weights and activations, "float32" or "bfloat16".
        prompts: how many of the own set, evenly over its categories.
        new_tokens: of each answer, whatever the model says of its end.
    """
    loaded = load_model(MODEL, dtype=DTYPES[dtype])
    ids = [encode_prompt(record.prompt, loaded.tokenizer) for record in spread(load_prompts("own"), prompts)]
    runs: dict[str, Run] = {}
    absent: dict[str, str] = {}
    for name, generate in providers(loaded, max(map(len, ids)) + new_tokens + 1):
        if isinstance(generate, str):
            absent[name] = generate
        else:
            generate(ids[0], 4)  # lazy set-up is not what is compared
            runs[name] = Run(generate)
    for number, prompt in enumerate(ids):
        names = list(runs)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            start_s = time.perf_counter()
            tokens = runs[name].generate(prompt, new_tokens)
            runs[name].seconds.append(time.perf_counter() - start_s)
            runs[name].tokens.append(tokens)
    baseline = runs.get(BASELINE)
    for name, run in runs.items():
        row = {"provider": name, "status": "ok", "dtype": dtype, "prompts": len(ids), "new_tokens": new_tokens}
        row |= {"k": 0 if name in (BASELINE, LLAMA_CPP, "ours") else K, "threads": torch.get_num_threads()}
        row |= _spread("tokens_per_s", run.rates())
        if baseline is not None:
            ratios = [rate / theirs for rate, theirs in zip(run.rates(), baseline.rates(), strict=True)]
            row |= _spread("speedup", ratios)
            row["same_text"] = sum(mine == theirs for mine, theirs in zip(run.tokens, baseline.tokens, strict=True))
        yield row | {"process_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    for name, why in absent.items():
        yield {"provider": name, "status": f"absent: {why}", "dtype": dtype}


def _spread(name: str, values: list[float]) -> dict:
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {f"{name}_p50": round(median(values), 3), f"{name}_p25": round(low, 3), f"{name}_p75": round(high, 3)}


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """Rows of float32, then bfloat16; `quick` is two prompts in float32. Greedy text has no seed."""
    yield from peer_rows("float32", 2 if quick else 8, 8 if quick else 32)
    if not quick:
        yield from peer_rows("bfloat16", 2, 16)


def table(rows: list[dict]) -> Table:
    lines = [
        [
            row["dtype"], row["provider"], str(row["k"]), f"{row['tokens_per_s_p50']:.1f}",
            f"{row['speedup_p50']:.2f} ({row['speedup_p25']:.2f} to {row['speedup_p75']:.2f})" if "speedup_p50" in row else "",
            f"{row['same_text']} of {row['prompts']}" if "same_text" in row else "",
        ]
        for row in rows
        if row["status"] == "ok"
    ]  # fmt: skip
    missing = dict.fromkeys(f"{row['provider']} is {row['status']}." for row in rows if row["status"] != "ok")
    note = "Speed-up over transformers by prompt: median and quartiles. Same text: prompts answered token for token alike."
    return Table(["dtype", "provider", "k", "tokens/s", "speed-up", "same text"], lines, " ".join([note, *missing]))


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Speed-up of every provider over transformers' plain decoding."""
    return [
        (f"greedy tokens/s over transformers, {row['dtype']}, batch 1: {row['provider']}", f"{row['speedup_p50']:.2f}")
        for row in rows
        if row["status"] == "ok" and "speedup_p50" in row and row["provider"] != BASELINE
    ]
