"""What a user asks for, and what comes back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from stepgraph.capture.ledger import Progress
from stepgraph.capture.schedule import require_int, show
from stepgraph.capture.state import MAX_LOGIT_BIAS, MAX_STOP_IDS
from stepgraph.capture.stops import StopStrings
from stepgraph.kernels.rejection import Verify
from stepgraph.model.tokenizer import StreamDecoder

INT64_MAX = 2**63 - 1  # what a state tensor can hold

TextCallback = Callable[[int, str], None]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop id or a stop string was generated
    LENGTH = "length"  # max_new_tokens, or no room left
    ABORTED = "aborted"  # taken back by the caller, or interrupted


def require_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise a ValueError that names the argument unless `value` is a finite real number in [low, high]."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        raise ValueError(f"{name} is {show(value)}; allowed is a number in {'(' if open_low else '['}{low:g}, {high:g}]")


# Lossless methods by name; synthetic acceptance is an engine's affair, since its text means nothing.
VERIFY = {"standard": Verify.STANDARD, "block": Verify.BLOCK}


def require_verify(value: object) -> None:
    """Raise a ValueError unless `value` names a lossless method of verification."""
    if not isinstance(value, str) or value not in VERIFY:
        raise ValueError(f"verify is {value!r}; allowed are {', '.join(VERIFY)}")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled.

    Attributes:
        max_new_tokens: most tokens to generate, ≥ 1.
        temperature: ≥ 0; 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1].
        min_p: keep tokens with at least this fraction of the largest probability, in [0, 1].
        seed: of the request's own random numbers, 0 ≤ seed < 2^63; None takes the engine's seed plus the request's number.
        stop_ids: token ids that end the request, in addition to the model's end-of-text ids.
        ignore_eos: do not stop at the model's end-of-text ids.
        draft_limit: most drafts per step for this request; 0 switches speculation off for it, None leaves it to the policy.
        stop: texts that end the request; the text ends before the first of them, the tokens with the one that completed it.
        min_tokens: nothing ends the request within this many tokens, 0 ≤ min_tokens ≤ max_new_tokens: stop ids are impossible
            there, and a stop string that is complete by then is text like any other.
        logit_bias: token id → number in [−100, 100] added to its logit; at most 128 tokens.
        repetition_penalty: in (0, 10]; divides positive and multiplies negative logits of tokens in prompt or answer.
        frequency_penalty: in [−2, 2]; subtracted once per occurrence in the answer.
        presence_penalty: in [−2, 2]; subtracted from every token that the answer has.
        logprobs: return the log-probability of each token: of the law at temperature 1, with bias and penalties applied and
            without top-k, top-p and min-p (see `stepgraph.kernels.logprobs`).
        verify: "standard" or "block" verification of drafts; None takes the engine's. Both are lossless.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    draft_limit: int | None = None
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: bool = False
    verify: str | None = None

    def __post_init__(self):
        require_int("max_new_tokens", self.max_new_tokens, 1, INT64_MAX)
        require_number("temperature", self.temperature, 0.0, 100.0)
        require_int("top_k", self.top_k, 0, INT64_MAX)
        require_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        require_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            require_int("seed", self.seed, 0, INT64_MAX)
        if self.draft_limit is not None:
            require_int("draft_limit", self.draft_limit, 0, INT64_MAX)
        if not isinstance(self.stop_ids, Sequence):
            raise ValueError(f"stop_ids is {self.stop_ids!r}; allowed are sequences of token ids")
        for stop_id in self.stop_ids:
            require_int("stop_ids", stop_id, 0, INT64_MAX)
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids has {len(self.stop_ids)} entries; at most {MAX_STOP_IDS} are allowed")
        texts = isinstance(self.stop, Sequence) and not isinstance(self.stop, str)
        if not texts or not all(isinstance(stop, str) and stop for stop in self.stop):
            raise ValueError(f"stop is {self.stop!r}; allowed are sequences of non-empty strings")
        require_int("min_tokens", self.min_tokens, 0, self.max_new_tokens)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {self.logit_bias!r}; allowed are mappings of token id to number")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed")
        for token, bias in self.logit_bias.items():
            require_int("a token id of logit_bias", token, 0)
            require_number(f"logit_bias of token {token}", bias, -100.0, 100.0)
        require_number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        require_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        require_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        for name, value in (("ignore_eos", self.ignore_eos), ("logprobs", self.logprobs)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; allowed are True and False")
        if self.verify is not None:
            require_verify(self.verify)

    @property
    def transforms_logits(self) -> bool:
        """Whether anything changes the logits before their law is taken."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalised or bool(self.logit_bias) or self.min_tokens > 0


@dataclass(eq=False)
class Request:
    """A request on its way through the engine. Positions count from the start of the prompt. Its answer's tokens and counts are
    in the engine's `Ledger`, by slot.
    """

    id: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    stop_ids: list[int]
    seed: int
    limit: int  # most tokens, prompt included
    arrived_s: float
    slot: int = -1
    prefilled: int = 0  # prompt tokens in the KV cache
    decoder: StreamDecoder | None = None
    stops: StopStrings | None = None
    verify: Verify = Verify.STANDARD
    rates: tuple[float, ...] = ()  # of synthetic acceptance
    on_text: TextCallback | None = None
    in_generate: bool = False  # a running `Engine.generate` collects its output
    text: str = ""
    unsent: str = ""  # final, and not handed out yet
    ended: FinishReason | None = None  # known to the host, and not handed out yet
    logprobs: list[float] = field(default_factory=list)
    watched: bool = field(init=False)  # its tokens have to be looked at as they come

    def __post_init__(self):
        self.watched = self.decoder is not None or self.params.logprobs

    @property
    def prefill_target(self) -> int:
        """The last prompt token is not prefilled: it is the first step's input."""
        return len(self.prompt_ids) - 1

    @property
    def stopped(self) -> bool:
        """A stop string is complete."""
        return self.stops is not None and self.stops.found

    def receive(self, tokens: list[int], logprobs: list[float], before: int) -> int:
        """Take in the tokens of a step; text that became final waits in `unsent`. Returns how many are kept: tokens after the
        one that completes a stop string are dropped, since what is counted is what the user gets.

        `before` is the number of tokens that the answer has already.
        """
        kept = len(tokens)
        if self.stops is None:
            self.unsent += self.decoder.push(tokens) if self.decoder is not None else ""
        else:
            for index, token in enumerate(tokens):  # one by one, to know which token completes a stop string
                self.unsent += self.stops.push(self.decoder.push([token]), before + index >= self.params.min_tokens)
                if self.stops.found:
                    kept = index + 1
                    break
        self.logprobs += logprobs[:kept]
        return kept

    def flush_text(self, answer_tokens: int) -> str:
        """The rest of the text at its end, after so many tokens."""
        if self.decoder is None or self.stopped:
            return ""
        rest = self.decoder.flush()
        if self.stops is None:
            return rest
        rest = self.stops.push(rest, answer_tokens > self.params.min_tokens)
        return rest if self.stops.found else rest + self.stops.flush()

    def output(self, reason: FinishReason, progress: Progress) -> "RequestOutput":
        ttft_ms = tpot_ms = None
        if progress.first_token_s is not None:
            ttft_ms = (progress.first_token_s - self.arrived_s) * 1e3
            if len(progress.token_ids) > 1:
                tpot_ms = (progress.last_token_s - progress.first_token_s) * 1e3 / (len(progress.token_ids) - 1)
        # An interrupt may come between a step's log-probabilities and its tokens.
        logprobs = self.logprobs[: len(progress.token_ids)] if self.params.logprobs else None
        return RequestOutput(
            self.id, self.prompt, self.prompt_ids, progress.token_ids, self.text, reason, progress.steps, progress.drafted_at,
            progress.accepted_at, ttft_ms, tpot_ms, logprobs, progress.repaired,
        )  # fmt: skip


@dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
        id: as `Engine.add` returned it.
        prompt: text, None when the request was given as token ids.
        prompt_ids, token_ids: tokens of the prompt and of the answer.
        text: the answer, "" without a tokenizer.
        finish_reason: why it ended.
        steps: steps it took part in.
        drafted_at, accepted_at: drafts proposed and accepted by position in the window.
        ttft_ms: from arrival to the first token, None if there was none.
        tpot_ms: mean time per further token, None with fewer than two tokens.
        logprobs: log-probability of each token of the answer, None unless asked for.
        repaired: rows of logits that were NaN, +inf or nothing but −inf, and had to be read as something else.
    """

    id: int
    prompt: str | None
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    steps: int
    drafted_at: list[int]
    accepted_at: list[int]
    ttft_ms: float | None
    tpot_ms: float | None
    logprobs: list[float] | None = None
    repaired: int = 0
