"""Continuous batching over `StepGraphs`: requests come and go while steps run, k is chosen before each step."""

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.intake import Intake, Prompt
from stepgraph.capture.launched import LaunchedStep, Rows, StepRecord
from stepgraph.capture.ledger import ACCEPTED, FINISHED, SEQ_LEN
from stepgraph.capture.policies.base import KPolicy
from stepgraph.capture.request import FinishReason, Request, RequestOutput, SamplingParams, TextCallback
from stepgraph.capture.schedule import require_int
from stepgraph.capture.scheduler import Scheduler
from stepgraph.capture.stats import EngineStats
from stepgraph.capture.transfer import Download
from stepgraph.kernels.advance import LENGTH, RESULT_HEAD, RUNNING
from stepgraph.model.tokenizer import Tokenizer

MAX_LAG = 1


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
        lag: steps that may be in flight when the next one is launched, 0 or 1; with 1 the device never waits for the host,
            and the host learns of a step one step later. Tokens are the same. None is 1 on CUDA, 0 elsewhere.
        on_step: called with the record of each step when its results have been read.

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
        lag: int | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ):
        state, most_k = graphs.step.state, max(policy.ks)
        if most_k > state.k_max:
            raise ValueError(f"the policy may ask k={most_k}; the state was made for k up to {state.k_max}")
        if graphs.step.drafter is None and most_k > 0:
            raise ValueError(f"the policy may ask k={most_k}; without a drafter only k=0 is possible")
        if graphs.step.drafter is not None and most_k == 0:
            warnings.warn(f"drafter {graphs.step.drafter.name} is loaded but never drafts: k is 0 at every batch", stacklevel=2)
        require_int("prefill_chunk", prefill_chunk, 1)
        self.lag = int(state.slots.is_cuda) if lag is None else require_int("lag", lag, 0, MAX_LAG)
        self.graphs, self.policy, self.tokenizer = graphs, policy, tokenizer
        self.prefill_chunk, self.on_step = prefill_chunk, on_step
        self.scheduler = Scheduler(state, graphs.step.kv.num_blocks, graphs.step.kv.block_size)
        vocab_size = graphs.step.target.config.vocab_size
        self.intake = Intake(self.scheduler, vocab_size, tokenizer, eos_token_ids, seed, verify, synthetic_rates, most_k)
        self.stats = EngineStats(state.k_max)
        self.interrupted = False
        self._in_flight: deque[LaunchedStep] = deque()
        self._rows: Rows | None = None  # of the last step
        self._next_id = 0
        self._requests: dict[int, Request] = {}
        # Finished and not handed out yet: what `step` returns, and what a running `generate` collects.
        self._outputs: dict[int, RequestOutput] = {}
        self._collected: dict[int, RequestOutput] = {}

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
        return self._queue(self.intake.request(self._next_id, prompt, params))

    def step(self) -> list[RequestOutput]:
        """Admit, run at most one prompt chunk, run one decoding step; returns the requests that have finished since the
        last call. Those of a `generate` that runs are left to it, should one of its callbacks call this.
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
        return self._collected[request_id] if request.in_generate else self._outputs.pop(request_id)

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
        if isinstance(prompts, str):  # a sequence of texts as well, one for each character
            raise ValueError(f"prompts is the text {prompts[:40]!r}; allowed are sequences of prompts, as [text] is")
        if not isinstance(params, SamplingParams | Sequence):
            raise ValueError(f"params is {params!r}; allowed are SamplingParams, and sequences of them")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling parameters were given for {len(prompts)} prompts")
        # All are checked before one is queued, so that a bad prompt leaves nothing behind.
        requests = [self.intake.request(self._next_id + i, *pair) for i, pair in enumerate(zip(prompts, each, strict=True))]
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
                for request_id in [request_id for request_id in self._collected if request_id in remaining]:
                    outputs[request_id] = self._collected.pop(request_id)
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
                if request.id in self._collected:
                    outputs[request.id] = self._collected.pop(request.id)
        if self.interrupted and on_finish is not None:
            for request_id in sorted(remaining):
                on_finish(outputs[request_id])
        return [outputs[request.id] for request in requests]

    def report(self) -> dict:
        """Figures of `EngineStats.report` and `StepGraphs.report` in one dictionary."""
        return self.stats.report() | self.graphs.report()

    # -- inside a step --------------------------------------------------------------------------------------------------

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
            self.scheduler.grow(np.array([oldest.slot]), np.array([stop]))
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
        self.stats.prefill_s += time.perf_counter() - start_s
        self._decode()
        self.stats.elapsed_s += time.perf_counter() - start_s

    def _decode(self) -> None:
        self._launch()
        # Results are read when there is a later step for the device to run meanwhile, or nothing more to launch.
        while self._in_flight and (len(self._in_flight) > self.lag or not self._launchable()):
            self._receive(self._in_flight.popleft())
        self._deliver()

    def _launchable(self) -> list[Request]:
        """Decoding requests that the steps in flight will not have brought to their limit: each commits a token at least."""
        requests = [request for request in self.scheduler.running if request.ended is None]
        if not self._in_flight:
            return requests
        length = self.scheduler.ledger.length
        flying = Counter(request.id for step in self._in_flight for request in step.rows.requests)
        return [request for request in requests if length[request.slot] + flying[request.id] < request.limit]

    def _launch(self) -> None:
        requests = self._launchable()
        if not requests:
            return
        if self._rows is None or self._rows.requests != requests:
            self._rows = Rows(requests)
        rows, state = self._rows, self.graphs.step.state
        lengths = self.scheduler.ledger.length[rows.slots]
        k = self.policy.choose(len(requests), sum(lengths.tolist()) // len(requests), rows.ids)
        most_new = k + 1 + sum(step.most_tokens for step in self._in_flight)
        # Blocks for the longest text that the steps in flight and this one can make.
        self.scheduler.grow(rows.slots, lengths + (most_new - 1))
        state.place(rows.slots)
        key = self.graphs.replay(len(requests), k)
        logprobs = {
            row: (first := int(lengths[row]), Download(state.logprobs[rows.slots[row], first : first + most_new]))
            for row in rows.watched
            if requests[row].params.logprobs
        }
        results = state.step_results(len(requests))
        self._in_flight.append(LaunchedStep(self.stats.steps, rows, k, key, self.graphs.eager_reason, results, logprobs))
        self.stats.steps += 1

    def _receive(self, step: LaunchedStep) -> None:
        """Take in all that a step committed, before anybody is told."""
        results, now_s, lag, rows = step.results.wait(), time.perf_counter(), len(self._in_flight), step.rows
        took_part = [row for row, token in enumerate(results[:, RESULT_HEAD].tolist()) if token >= 0]
        accepted = results[:, ACCEPTED].tolist()
        if len(took_part) < len(accepted):
            accepted = [accepted[row] for row in took_part]
        record = None if self.on_step is None else step.record(results, took_part, lag)
        # A request may have ended meanwhile: in an earlier step, or by a callback; its slot is then another's.
        slots, gone = rows.slots, [row for row, request in enumerate(rows.requests) if request.ended is not None]
        if gone:
            slots = slots.copy()
            slots[gone] = -1
        for row in rows.watched:
            if slots[row] >= 0:
                self._look_at(step, row, results[row])
        self.scheduler.ledger.receive(slots, results, step.k, now_s)
        for row, finished in enumerate(results[:, FINISHED].tolist()):
            if finished != RUNNING and slots[row] >= 0:
                request = rows.requests[row]
                request.ended = request.ended or (FinishReason.LENGTH if finished == LENGTH else FinishReason.STOP)
        ids = rows.ids if len(accepted) == len(rows.ids) else [rows.ids[row] for row in took_part]
        self.policy.observe(step.k, accepted, lag, ids)
        if record is not None:
            self.on_step(record)

    def _look_at(self, step: LaunchedStep, row: int, result: np.ndarray) -> None:
        """Give a request the tokens of its row of a step. What it drops is taken out of `result`."""
        request, sent = step.rows.requests[row], result[RESULT_HEAD : RESULT_HEAD + step.k + 1]
        tokens = [token for token in sent.tolist() if token >= 0]
        logprobs = step.logprobs_of(row, int(result[SEQ_LEN]), len(tokens))
        kept = request.receive(tokens, logprobs, self.scheduler.ledger.answer_tokens(request.slot))
        sent[kept:] = -1
        result[ACCEPTED] = min(result[ACCEPTED], kept)
        if request.stopped:
            request.ended = FinishReason.STOP

    def _deliver(self) -> None:
        """Hand out new text and finished requests. A callback may raise, or end any request; what it keeps from going out goes
        out with the next step.
        """
        for request in [request for request in self.scheduler.running if request.unsent or request.ended is not None]:
            if request.unsent and request.id in self._requests:
                self._emit_text(request)
            if request.ended is not None and request.id in self._requests:
                self._finish(request, request.ended)

    def _emit_text(self, request: Request) -> None:
        text, request.unsent = request.unsent, ""
        request.text += text
        if text and request.on_text is not None:
            request.on_text(request.id, text)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """Free what a request holds and keep its output; its text callback comes last, since it may raise."""
        progress = self.scheduler.progress(request)
        self.scheduler.release(request)
        request.ended = reason
        del self._requests[request.id]
        request.unsent += request.flush_text(len(progress.token_ids))
        rest = request.unsent
        request.text += rest
        output = request.output(reason, progress)
        (self._collected if request.in_generate else self._outputs)[request.id] = output
        self.stats.add(output)
        if rest and request.on_text is not None:
            request.on_text(request.id, rest)
