"""Continuous batching over `StepGraphs`: requests come and go while steps run, k is chosen before each step."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.policies.base import KPolicy
from stepgraph.capture.request import FinishReason, Request, RequestOutput, SamplingParams
from stepgraph.capture.scheduler import Scheduler
from stepgraph.capture.state import MAX_STOP_IDS
from stepgraph.capture.stats import EngineStats
from stepgraph.kernels.advance import LENGTH, STOPPED
from stepgraph.model.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[int]
TextCallback = Callable[[int, str], None]


class Engine:
    """Runs requests through captured steps.

    Use it as `generate(prompts, params)`, or request by request: `add`, then `step` until `unfinished` is 0; each `step`
    returns the requests that finished in it.

    Args:
        graphs: the steps to run.
        policy: chooses k for each step from the number of decoding requests.
        tokenizer: needed for text; without one, prompts are token ids.
        prefill_chunk: most prompt tokens run between two steps.
        seed: request i without a seed of its own gets `seed + i`.

    Attributes:
        stats: totals over finished requests.
        interrupted: a keyboard interrupt ended the last `generate`.
    """

    def __init__(
        self,
        graphs: StepGraphs,
        policy: KPolicy,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        prefill_chunk: int = 256,
        seed: int = 0,
    ):
        state = graphs.step.state
        if max(policy.ks) > state.k_max:
            raise ValueError(f"the policy may ask k={max(policy.ks)}; the state was made for k up to {state.k_max}")
        if graphs.step.drafter is None and max(policy.ks) > 0:
            raise ValueError(f"the policy may ask k={max(policy.ks)}; without a drafter only k=0 is possible")
        if graphs.step.drafter is not None and max(policy.ks) == 0:
            warnings.warn(f"drafter {graphs.step.drafter.name} is loaded but never drafts: k is 0 at every batch", stacklevel=2)
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
        self.graphs, self.policy, self.tokenizer = graphs, policy, tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.prefill_chunk, self.seed = prefill_chunk, seed
        kv = graphs.step.kv
        self.scheduler = Scheduler(state, kv.num_blocks, kv.block_size)
        self.stats = EngineStats(state.k_max)
        self.interrupted = False
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._on_text: TextCallback | None = None

    # -- request by request ---------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests that wait, prefill or decode."""
        return self.scheduler.unfinished

    def add(self, prompt: Prompt, params: SamplingParams = SamplingParams()) -> int:  # noqa: B008 (frozen)
        """Queue a request and return its id.

        Raises:
            ValueError: the prompt is empty, has unknown token ids, or the request can never fit; nothing is queued.
        """
        return self._queue(self._new_request(self._next_id, prompt, params))

    def step(self) -> list[RequestOutput]:
        """Admit, run at most one prompt chunk, run one decoding step; returns the requests that finished."""
        start_s = time.perf_counter()
        self.scheduler.admit()
        self._prefill()
        finished = self._decode()
        self.stats.elapsed_s += time.perf_counter() - start_s
        return finished

    def abort(self, request_id: int) -> RequestOutput:
        """End a request now, with what it has generated so far."""
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id} is not running")
        return self._finish(request, FinishReason.ABORTED)

    # -- all at once ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008 (frozen)
        *,
        on_text: TextCallback | None = None,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts and return the outputs in the order of the prompts.

        Args:
            prompts: texts, or lists of token ids.
            params: one for all, or one each.
            on_text: called with (request id, new text) as text becomes final.
            on_finish: called with each output as it finishes.

        A keyboard interrupt ends every request with what it has; `interrupted` then says so.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters were given for {len(prompts)} prompts")
        outputs: dict[int, RequestOutput] = {}
        self._on_text, self.interrupted = on_text, False

        def finish(batch: Iterable[RequestOutput]) -> None:
            for output in batch:
                outputs[output.id] = output
                remaining.discard(output.id)
                if on_finish is not None:
                    on_finish(output)

        # All are checked before one is queued, so that a bad prompt leaves nothing behind.
        requests = [self._new_request(self._next_id + i, *pair) for i, pair in enumerate(zip(prompts, each, strict=True))]
        ids = [self._queue(request) for request in requests]
        remaining = set(ids)
        try:
            self.graphs.capture()
            while remaining:
                finish(self.step())
        except KeyboardInterrupt:
            self.interrupted = True
            finish([self.abort(request_id) for request_id in ids if request_id in self._requests])
        finally:
            self._on_text = None
        return [outputs[request_id] for request_id in ids if request_id in outputs]

    def report(self) -> dict:
        """Figures of `EngineStats.report` and `StepGraphs.report` in one dictionary."""
        return self.stats.report() | self.graphs.report()

    # -- inside a step --------------------------------------------------------------------------------------------------

    def _new_request(self, request_id: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids, state, scheduler = self._prompt_ids(prompt), self.graphs.step.state, self.scheduler
        if len(ids) >= state.max_len:
            raise ValueError(f"the prompt has {len(ids)} tokens; max_len={state.max_len} leaves room for {state.max_len - 1}")
        stop_ids = [*dict.fromkeys((*params.stop_ids, *(() if params.ignore_eos else self.eos_token_ids)))]
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"the request has {len(stop_ids)} stop ids with the model's own; at most {MAX_STOP_IDS} fit")
        request = Request(
            id=request_id,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_ids=ids,
            params=params,
            stop_ids=stop_ids,
            seed=self.seed + request_id if params.seed is None else params.seed,
            limit=min(len(ids) + params.max_new_tokens, state.max_len),
            arrived_s=time.perf_counter(),
            drafted_at=[0] * state.k_max,
            accepted_at=[0] * state.k_max,
            decoder=StreamDecoder(self.tokenizer) if self.tokenizer is not None else None,
        )
        needed, capacity = scheduler.most_blocks(request), scheduler.allocator.capacity
        if needed > capacity:
            raise ValueError(
                f"a prompt of {len(ids)} tokens with max_new_tokens={params.max_new_tokens} needs {needed} KV blocks of "
                f"{scheduler.block_size} tokens; the cache has {capacity}"
            )
        return request

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("the model has no tokenizer; give prompts as token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("a prompt is empty; at least one token is needed")
        vocab = self.graphs.step.target.config.vocab_size
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab:
                raise ValueError(f"a prompt has token id {token!r}; allowed are integers from 0 to {vocab - 1}")
        return ids

    def _queue(self, request: Request) -> int:
        self._next_id = request.id + 1
        self._requests[request.id] = request
        self.scheduler.waiting.append(request)
        return request.id

    def _prefill(self) -> None:
        """One chunk of the oldest request that has prompt left, so that where a prompt is cut depends on itself alone.
        Requests without any (more) join the decoding ones.
        """
        prefilling = self.scheduler.prefilling
        oldest = next((request for request in prefilling if request.prefilled < request.prefill_target), None)
        if oldest is not None:
            stop = min(oldest.prefilled + self.prefill_chunk, oldest.prefill_target)
            self.scheduler.grow(oldest, stop)
            with torch.no_grad():
                self.graphs.step.prefill(oldest.slot, oldest.prompt_ids[oldest.prefilled : stop], oldest.prefilled)
            oldest.prefilled = stop
        for request in [request for request in prefilling if request.prefilled == request.prefill_target]:
            prefilling.remove(request)
            self.scheduler.running.append(request)

    def _decode(self) -> list[RequestOutput]:
        running = list(self.scheduler.running)
        if not running:
            return []
        state, slots = self.graphs.step.state, [request.slot for request in running]
        k = self.policy.choose(len(running))
        for request in running:
            self.scheduler.grow(request, request.length + k)
        state.set_rows(slots)
        self.graphs.replay(len(running), k)
        self.stats.steps += 1

        now_s, accepted, finished = time.perf_counter(), [], []
        for request, after in zip(running, state.snapshot(slots), strict=True):
            accepted.append(sum(after.accepted_at) - sum(request.accepted_at))
            request.steps, request.drafted_at, request.accepted_at = after.steps, after.drafted_at, after.accepted_at
            self._receive(request, state.tokens(request.slot, request.length, after.seq_len + 1), now_s)
            if after.finished == STOPPED:
                finished.append(self._finish(request, FinishReason.STOP))
            elif after.finished == LENGTH:
                finished.append(self._finish(request, FinishReason.LENGTH))
        self.policy.observe(k, accepted)
        return finished

    def _receive(self, request: Request, tokens: list[int], now_s: float) -> None:
        request.output_ids += tokens
        request.first_token_s = request.first_token_s or now_s
        request.last_token_s = now_s
        if request.decoder is not None:
            self._emit_text(request, request.decoder.push(tokens))

    def _emit_text(self, request: Request, text: str) -> None:
        request.text += text
        if text and self._on_text is not None:
            self._on_text(request.id, text)

    def _finish(self, request: Request, reason: FinishReason) -> RequestOutput:
        self.scheduler.release(request)
        del self._requests[request.id]
        if request.decoder is not None:
            self._emit_text(request, request.decoder.flush())
        output = request.output(reason)
        self.stats.add(output)
        return output
