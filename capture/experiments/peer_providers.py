"""Who answers prompts in the comparison with other programs: transformers, llama.cpp and our engines, one interface for all."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch

from stepgraph.capture.build import EngineOptions, build_engine, load_target
from stepgraph.capture.experiments.llama_cpp import llama_cpp_generate
from stepgraph.capture.request import SamplingParams
from stepgraph.model.checkpoint import CheckpointError, LoadedModel
from stepgraph.model.transformer import Transformer

MODEL = "smollm2-135m"
THEIRS, OURS = "transformers", "ours"
ASSISTED = f"{THEIRS}-assisted"
LLAMA_CPP, Q4_1 = "llama.cpp", "Q4_1"
K = 3
# Drafter and k of ours, for one prompt and for many at once.
OUR_WAYS = (("none", 0), ("ngram", K), ("eagle3", K), ("hybrid", K), ("hybrid", 5))
OUR_WAYS_AT_ONCE = (("none", 0), ("hybrid", 1))
# No smaller model of the family comes with a package; transformers can assist itself with its own first layers.
ASSISTING_LAYERS = 20
THEIR_OPTIONS = {
    THEIRS: {},
    f"{THEIRS}-lookup": {"prompt_lookup_num_tokens": K},
    ASSISTED: {
        "assistant_early_exit": ASSISTING_LAYERS, "num_assistant_tokens": K, "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    },
}  # fmt: skip

# Prompts as token ids, number of new tokens -> the new tokens of each.
Generate = Callable[[list[list[int]], int], list[list[int]]]


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
    weights["lm_head.weight"] = model.output_rows
    theirs.load_state_dict(weights)
    return theirs.eval()


def their_generate(theirs: torch.nn.Module, **options) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        inputs = torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        with torch.no_grad():
            out = theirs.generate(inputs, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options)
        return out[:, longest:].tolist()

    return generate


def _ours(options: EngineOptions, loaded: LoadedModel) -> Generate:
    engine = build_engine(options, loaded).engine
    engine.graphs.capture()  # done once in an engine's life

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True))
        return [output.token_ids for output in outputs]

    return generate


def providers(weights: str, batch: int, max_len: int) -> Iterator[tuple[str, int, Generate | str]]:
    """Name, k and function of each provider with these weights, or why it is absent.

    Args:
        weights: "float32", "bfloat16", "int8" (ours alone, with bfloat16 activations) or "Q4_1" (llama.cpp alone).
        batch: prompts at once; above 1 only plain decoding and our default drafter, at its k there, take part.
        max_len: most tokens of a text, prompt included.
    """
    if weights == Q4_1:
        absent = "llama-cpp-python is not installed"
        yield LLAMA_CPP, 0, llama_cpp_generate(MODEL, max_len) if find_spec("llama_cpp") else absent
        return
    int8 = weights == "int8"
    # Decode rows keep their bits, so that the text is the same for every k; with compiled products that costs nothing.
    base = EngineOptions(
        MODEL, "none", k=0, dtype="bfloat16" if int8 else weights, weights="int8" if int8 else None, device="cpu",
        max_batch=batch, max_len=max_len, invariant_linear=weights == "bfloat16",
    )  # fmt: skip
    loaded = load_target(base)
    if not int8:
        theirs = hugging_face(loaded.model) if find_spec("transformers") else None
        for name, options in THEIR_OPTIONS.items():
            # Assisting itself takes it four times as long as plain decoding: once is enough to know.
            if not options or (batch == 1 and (name != ASSISTED or weights == "float32")):
                k = K if options else 0
                yield name, k, "transformers is not installed" if theirs is None else their_generate(theirs, **options)
    for drafter, k in OUR_WAYS if batch == 1 else OUR_WAYS_AT_ONCE:
        name = OURS if drafter == "none" else f"{OURS}-{drafter}"
        try:
            yield name, k, _ours(replace(base, drafter=drafter, k=k), loaded)
        except CheckpointError as error:
            yield name, k, str(error)
