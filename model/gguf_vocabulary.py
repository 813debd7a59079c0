"""The byte-level BPE tokenizer that a GGUF file's metadata describes."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer of a GGUF file so that it gives the same ids as the model's own `tokenizer.json`.

    Args:
        metadata: the file's metadata: `tokenizer.ggml.model`, `.pre`, `.tokens`, `.merges`, `.token_type`.

    Raises:
        ValueError: the vocabulary or its pre-tokenizer is of a kind that is not supported, or a part is missing.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; allowed: gpt2 (byte-level BPE)")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre is {pre!r}; allowed: {', '.join(PRE_TOKENIZERS)}")
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if not isinstance(metadata.get(key), list):
            raise ValueError(f"{key} is missing; a byte-level BPE vocabulary needs it")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    llama3 = pre == "llama-bpe"
    # Llama 3 takes a word that is a token whole, even where the merges would not lead to it.
    try:
        tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=llama3))
    except Exception as error:  # the Rust library raises nothing narrower
        raise ValueError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()

    types = metadata.get("tokenizer.ggml.token_type", [])
    added = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in added])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", llama3):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "llama-bpe":
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return byte_level
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
