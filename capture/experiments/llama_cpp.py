"""Greedy text by llama.cpp, through `llama-cpp-python`, from the embedded model's own file."""

from collections.abc import Callable
from itertools import islice

import torch

from stepgraph.model.checkpoint.embedded import embedded_path


def llama_cpp_generate(model: str, max_len: int) -> Callable[[list[int], int], list[int]]:
    """(prompt ids, number of new tokens) -> the new tokens, whatever the model says of its end; 4-bit weights as they are.

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

    def generate(ids: list[int], new: int) -> list[int]:
        llama.reset()  # else the part of the prompt that the last one shares is not computed again
        return list(islice(llama.generate(ids, temp=0.0), new))

    return generate
