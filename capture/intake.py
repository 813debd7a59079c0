"""From what a user asks for to a `Request`, or to one sentence that says why not."""

import time
import warnings
from collections.abc import Iterable, Sequence

from stepgraph.capture.request import INT64_MAX, VERIFY, Request, SamplingParams, require_number, require_verify
from stepgraph.capture.scheduler import Scheduler
from stepgraph.capture.state import MAX_STOP_IDS
from stepgraph.capture.stops import StopStrings
from stepgraph.kernels.rejection import Verify
from stepgraph.model.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[int]


class Intake:
    """Makes requests that can run on one engine.

    Args:
        scheduler: of the engine; knows the sizes that a request has to fit.
        vocab_size: token ids are below it.
        tokenizer: needed for text; without one, prompts are token ids.
        eos_token_ids: end every request that does not ignore them.
        seed: request i without a seed of its own gets `seed + i`.
        verify: "standard" or "block", for requests that do not say.
        synthetic_rates: accept draft i with the i-th of these probabilities; at least `max_k` of them.
        max_k: largest k of the engine's policy.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: Iterable[int],
        seed: int,
        verify: str,
        synthetic_rates: Sequence[float] | None,
        max_k: int,
    ):
        require_verify(verify)
        if synthetic_rates is not None:
            if len(synthetic_rates) < max_k:
                raise ValueError(f"synthetic_rates has {len(synthetic_rates)} entries; the policy may ask k={max_k}")
            for rate in synthetic_rates:
                require_number("an entry of synthetic_rates", rate, 0.0, 1.0)
            warnings.warn("acceptance is synthetic: the text means nothing, only the timing does", stacklevel=3)
        self.scheduler, self.vocab_size, self.tokenizer = scheduler, vocab_size, tokenizer
        self.eos_token_ids, self.seed, self.verify = tuple(eos_token_ids), seed, verify
        self.synthetic_rates = None if synthetic_rates is None else tuple(synthetic_rates[: scheduler.state.k_max])

    def request(self, request_id: int, prompt: Prompt, params: SamplingParams) -> Request:
        """Raises a ValueError when the prompt is empty, has unknown token ids, or the request can never fit."""
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is {params!r}; allowed are SamplingParams")
        ids, state, scheduler = self._prompt_ids(prompt), self.scheduler.state, self.scheduler
        if len(ids) >= state.max_len:
            raise ValueError(f"the prompt has {len(ids)} tokens; max_len={state.max_len} leaves room for {state.max_len - 1}")
        stop_ids = [*dict.fromkeys((*params.stop_ids, *(() if params.ignore_eos else self.eos_token_ids)))]
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"the request has {len(stop_ids)} stop ids with the model's own; at most {MAX_STOP_IDS} fit")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop is {params.stop!r}; stop strings need a tokenizer, and the model has none")
        for token in params.logit_bias:
            if token >= self.vocab_size:
                raise ValueError(f"logit_bias has token id {token}; allowed are integers from 0 to {self.vocab_size - 1}")
        request = Request(
            id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=ids,
            params=params,
            stop_ids=stop_ids,
            seed=(self.seed + request_id) & INT64_MAX if params.seed is None else params.seed,
            limit=min(len(ids) + params.max_new_tokens, state.max_len),
            arrived_s=time.perf_counter(),
            decoder=StreamDecoder(self.tokenizer) if self.tokenizer is not None else None,
            stops=StopStrings(params.stop) if params.stop else None,
            verify=Verify.SYNTHETIC if self.synthetic_rates is not None else VERIFY[params.verify or self.verify],
            rates=self.synthetic_rates or (),
        )
        needed, capacity = scheduler.most_blocks(request), scheduler.blocks.capacity
        if needed > capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens with max_new_tokens={params.max_new_tokens} needs {needed} KV blocks of "
                f"{scheduler.blocks.block_size} tokens; the cache has {capacity}"
            )
        return request

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model has no tokenizer; give prompts as token ids")
            ids = self.tokenizer.encode(prompt)
        elif not isinstance(prompt, Iterable):
            raise ValueError(f"a prompt is {prompt!r}; allowed are texts and sequences of token ids")
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("a prompt is empty; at least one token is needed")
        for token in ids:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                raise ValueError(f"a prompt has token id {token!r}; allowed are integers from 0 to {self.vocab_size - 1}")
        return ids
