"""Greedy text by llama.cpp, through `llama-cpp-python`, from the embedded model's own file."""

from collections.abc import Callable
from itertools import islice

import torch

from stepgraph.model.checkpoint.embedded import embedded_path


def llama_cpp_generate(model: str, max_len: int) -> Callable[[list[list[int]], int], list[list[int]]]:
    """(ids of prompts, number of new tokens) -> the new tokens of each, whatever the model says of its end; one prompt after
    the other, 4-bit weights as they are.

    Args:
        model: an embedded model's name.
        max_len: most tokens of a text, prompt included.
    """
    import llama_cpp

    threads, defaults = torch.get_num_threads(), llama_cpp.llama_model_default_params

    def without_repacking():
        params = defaults()
        params.use_extra_bufts = False
        return params

    # Its AMX path crashes on a Q4_1 file; `Llama` does not hand the switch on.
    if torch.cpu._is_amx_tile_supported():
        llama_cpp.llama_cpp.llama_model_default_params = without_repacking
    try:
        llama = llama_cpp.Llama(
            str(embedded_path(model)), n_ctx=max_len, n_threads=threads, n_threads_batch=threads, verbose=False
        )
    finally:
        llama_cpp.llama_cpp.llama_model_default_params = defaults

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        texts = []
        for ids in prompts:
            llama.reset()  # else the part of the prompt that the last one shares is not computed again
            texts.append(list(islice(llama.generate(ids, temp=0.0), new)))
        return texts

    return generate
