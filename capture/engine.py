"""Continuous batching over `StepGraphs`: requests come and go while steps run, k is chosen before each step."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.policies.base import KPolicy
from stepgraph.capture.request import (
    INT64_MAX,
    VERIFY,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TextCallback,
    require_number,
    require_verify,
)
from stepgraph.capture.scheduler import Scheduler
from stepgraph.capture.state import MAX_STOP_IDS, SlotSnapshot
from stepgraph.capture.stats import EngineStats
from stepgraph.capture.stops import StopStrings
from stepgraph.kernels.advance import RUNNING, STOPPED
from stepgraph.kernels.rejection import Verify
from stepgraph.model.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[int]


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
        verify: "standard" or "block", for requests that do not say.
        synthetic_rates: accept draft i with the i-th of these probabilities, whatever the models say. NOT lossless: for
            timing steps at a given acceptance only.

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
        verify: str = "standard",
        synthetic_rates: Sequence[float] | None = None,
    ):
        state = graphs.step.state
        require_verify(verify)
        if synthetic_rates is not None:
            if len(synthetic_rates) < max(policy.ks):
                raise ValueError(f"synthetic_rates has {len(synthetic_rates)} entries; the policy may ask k={max(policy.ks)}")
            for rate in synthetic_rates:
                require_number("an entry of synthetic_rates", rate, 0.0, 1.0)
            warnings.warn("acceptance is synthetic: the text means nothing, only the timing does", stacklevel=2)
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
        self.verify = verify
        self.synthetic_rates = None if synthetic_rates is None else tuple(synthetic_rates[: state.k_max])
        kv = graphs.step.kv
        self.scheduler = Scheduler(state, kv.num_blocks, kv.block_size)
        self.stats = EngineStats(state.k_max)
        self.interrupted = False
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        self._outputs: dict[int, RequestOutput] = {}  # finished, not handed out yet

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
        """Admit, run at most one prompt chunk, run one decoding step; returns the requests that have finished since the
        last call.
        """
        self._run_step()
        return [self._outputs.pop(request_id) for request_id in list(self._outputs)]

    def abort(self, request_id: int) -> RequestOutput:
        """End a request now, with what it has generated so far."""
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id} is not running")
        self._finish(request, FinishReason.ABORTED)
        # A `generate` that this call interrupts still has to hand the output to its own caller.
        return self._outputs[request_id] if request.in_generate else self._outputs.pop(request_id)

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

        A keyboard interrupt ends every request with what it has; `interrupted` then says so. Any other exception of a
        callback ends them too and goes on to the caller.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters were given for {len(prompts)} prompts")
        # All are checked before one is queued, so that a bad prompt leaves nothing behind.
        requests = [self._new_request(self._next_id + i, *pair) for i, pair in enumerate(zip(prompts, each, strict=True))]
        for request in requests:
            request.on_text, request.in_generate = on_text, True
            self._queue(request)
        remaining = {request.id for request in requests}
        outputs: dict[int, RequestOutput] = {}
        self.interrupted = False
        try:
            self.graphs.capture()
            while remaining:
                self._run_step()
                for request_id in [request_id for request_id in self._outputs if request_id in remaining]:
                    outputs[request_id] = self._outputs.pop(request_id)
                    remaining.discard(request_id)
                    if on_finish is not None:
                        on_finish(outputs[request_id])
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            for request in requests:
                request.on_text = None
                if request.id in self._requests:
                    self._finish(request, FinishReason.ABORTED)
                if request.id in self._outputs:
                    outputs[request.id] = self._outputs.pop(request.id)
        if self.interrupted and on_finish is not None:
            for request_id in sorted(remaining):
                on_finish(outputs[request_id])
        return [outputs[request.id] for request in requests]

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
            seed=(self.seed + request_id) & INT64_MAX if params.seed is None else params.seed,
            limit=min(len(ids) + params.max_new_tokens, state.max_len),
            arrived_s=time.perf_counter(),
            drafted_at=[0] * state.k_max,
            accepted_at=[0] * state.k_max,
            decoder=StreamDecoder(self.tokenizer) if self.tokenizer is not None else None,
            stops=StopStrings(params.stop) if params.stop else None,
            verify=Verify.SYNTHETIC if self.synthetic_rates is not None else VERIFY[params.verify or self.verify],
            rates=self.synthetic_rates or (),
        )
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop is {params.stop!r}; stop strings need a tokenizer, and the model has none")
        vocab = self.graphs.step.target.config.vocab_size
        for token in params.logit_bias:
            if token >= vocab:
                raise ValueError(f"logit_bias has token id {token}; allowed are integers from 0 to {vocab - 1}")
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

    def _run_step(self) -> None:
        start_s = time.perf_counter()
        self.scheduler.admit()
        self._prefill()
        self._decode()
        self.stats.elapsed_s += time.perf_counter() - start_s

    def _decode(self) -> None:
        running = list(self.scheduler.running)
        if not running:
            return
        state, slots = self.graphs.step.state, [request.slot for request in running]
        k = self.policy.choose(len(running))
        for request in running:
            self.scheduler.grow(request, request.length + k)
        state.set_rows(slots)
        self.graphs.replay(len(running), k)
        self.stats.steps += 1

        now_s, after = time.perf_counter(), state.snapshot(slots)
        self.policy.observe(
            k, [sum(now.accepted_at) - sum(request.accepted_at) for request, now in zip(running, after, strict=True)]
        )
        for request, now in zip(running, after, strict=True):
            # A callback may end any request, this one included; its slot is then another's.
            if request.id in self._requests:
                self._receive(request, now, now_s)
            if request.id in self._requests and (now.finished != RUNNING or request.stopped):
                stopped = now.finished == STOPPED or request.stopped
                self._finish(request, FinishReason.STOP if stopped else FinishReason.LENGTH)

    def _receive(self, request: Request, now: SlotSnapshot, now_s: float) -> None:
        """Take in what a step committed; text goes out last, since its callback may do anything."""
        state, start, stop = self.graphs.step.state, request.length, now.seq_len + 1
        tokens = state.tokens(request.slot, start, stop)
        logprobs = state.logprobs[request.slot, start:stop].tolist() if request.params.logprobs else []
        request.first_token_s = request.first_token_s or now_s
        request.last_token_s = now_s
        self._emit_text(request, request.receive(tokens, logprobs, now))

    def _emit_text(self, request: Request, text: str) -> None:
        request.text += text
        if text and request.on_text is not None:
            request.on_text(request.id, text)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Free what a request holds and keep its output; its text callback comes last, since it may raise."""
        self.scheduler.release(request)
        del self._requests[request.id]
        rest = request.flush_text()
        request.text += rest
        self._outputs[request.id] = output = request.output(reason)
        self.stats.add(output)
        if rest and request.on_text is not None:
            request.on_text(request.id, rest)
