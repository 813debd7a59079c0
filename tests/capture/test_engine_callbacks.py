"""Callbacks may do anything: abort, raise, generate again. No request is lost, none is left behind."""

import pytest
import torch
from worlds import tiny_model, tiny_step

from stepgraph.capture.engine import Engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.policies import FixedPolicy
from stepgraph.capture.request import FinishReason, SamplingParams


class LetterTokenizer:
    """One letter a token, so that every token is text at once."""

    eos_token_ids = ()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 61 for letter in text]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("A") + token) for token in ids)


def engine_with_text(num_slots: int = 4) -> Engine:
    policy = FixedPolicy(0)
    graphs = StepGraphs(tiny_step("none", model=tiny_model(), num_slots=num_slots), policy.keys(num_slots), mode="EAGER")
    return Engine(graphs, policy, tokenizer=LetterTokenizer())


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count)


def assert_clean(engine: Engine) -> None:
    assert engine.unfinished == 0
    assert not engine._requests
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.capacity
    assert len(engine.scheduler.free_slots) == engine.graphs.step.state.num_slots
    assert len(engine.generate([[9]], tokens(2))[0].token_ids) == 2


def test_abort_of_another_request_when_one_finishes():
    engine = engine_with_text()
    outputs = engine.generate([[1], [2]], [tokens(2), tokens(40)], on_finish=lambda output: output.id == 0 and engine.abort(1))
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, FinishReason.ABORTED]
    assert len(outputs[1].token_ids) == 2
    assert_clean(engine)


@pytest.mark.parametrize("victim", [0, 1])
def test_abort_from_the_text_callback(victim):
    engine, aborted = engine_with_text(), []

    def on_text(request_id, _):
        if request_id == 0 and engine.scheduler.ledger.answer_tokens(engine._requests[0].slot) == 2 and not aborted:
            aborted.append(engine.abort(victim))

    outputs = engine.generate([[1], [2]], tokens(6), on_text=on_text)
    # A step is taken in whole before anybody is told of it, so the victim keeps its second token.
    assert len(outputs[victim].token_ids) == 2
    assert outputs[victim].finish_reason is FinishReason.ABORTED
    assert len(outputs[1 - victim].token_ids) == 6
    assert_clean(engine)


def test_generate_inside_a_callback():
    engine, inner = engine_with_text(), []

    def on_finish(output):
        if not inner:
            inner.extend(engine.generate([[7, 7]], tokens(20)))

    outputs = engine.generate([[1], [2]], [tokens(2), tokens(5)], on_finish=on_finish)
    assert [len(output.token_ids) for output in outputs] == [2, 5]
    assert len(inner[0].token_ids) == 20
    assert_clean(engine)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["on_text", "on_finish"])
def test_step_inside_a_callback_takes_nothing_from_generate(where):
    engine, handed = engine_with_text(), []
    mine = engine.add([4], tokens(2))
    engine.step()

    def callback(*_):
        handed.extend(output.id for output in engine.step())

    outputs = engine.generate([[1], [2], [3]], [tokens(1), tokens(2), tokens(5)], **{where: callback})
    assert [len(output.token_ids) for output in outputs] == [1, 2, 5]
    assert handed == [mine]
    assert_clean(engine)


@pytest.mark.parametrize("where", ["on_text", "on_finish"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_exception_in_a_callback_ends_the_calls_requests(where, kind):
    engine = engine_with_text()
    waiting = engine.add([5], tokens(50))

    def raises(*args):
        if where == "on_finish" or args[0] == 2:
            raise kind("stop")

    def call():
        return engine.generate([[1], [2], [3]], tokens(3), **{where: raises})

    if kind is RuntimeError:
        with pytest.raises(RuntimeError, match="stop"):
            call()
    elif where == "on_text":
        outputs = call()
        assert engine.interrupted
        assert [len(output.token_ids) for output in outputs] == [1, 1, 1]
    else:
        with pytest.raises(KeyboardInterrupt):  # the report of the interrupt is interrupted
            call()
    assert list(engine._requests) == [waiting]
    engine.abort(waiting)
    assert_clean(engine)


def test_output_of_a_request_added_by_hand_waits_for_step():
    engine = engine_with_text()
    mine = engine.add([4], tokens(2))
    assert [output.id for output in engine.generate([[1]], tokens(6))] == [mine + 1]
    (output,) = engine.step()
    assert (output.id, len(output.token_ids)) == (mine, 2)
    assert_clean(engine)


@pytest.mark.parametrize(
    "fields", [{"top_k": 2**64}, {"stop_ids": (2**64,)}, {"max_new_tokens": 2**64}, {"draft_limit": 2**64}, {"seed": 2**63}]
)
def test_numbers_the_state_cannot_hold_are_refused(fields):
    with pytest.raises(ValueError, match=f"{next(iter(fields))} is {2**63 if 'seed' in fields else 2**64}"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("abc", SamplingParams(), r"^prompts is the text 'abc'; allowed are sequences of prompts, as \[text\] is$"),
        ([1, 2], SamplingParams(), "^a prompt is 1; allowed are texts and sequences of token ids$"),
        ([[1]], None, "^params is None; allowed are SamplingParams, and sequences of them$"),
        ([[1]], [0.5], "^params is 0.5; allowed are SamplingParams$"),
    ],
)
def test_what_is_no_prompt_and_no_parameters_is_named(prompts, params, message):
    engine = engine_with_text()
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, params)
    assert_clean(engine)


def test_largest_numbers_work():
    policy = FixedPolicy(0)
    graphs = StepGraphs(tiny_step("none", num_slots=2), policy.keys(2), mode="EAGER")
    engine = Engine(graphs, policy, seed=2**63 - 1)
    params = SamplingParams(max_new_tokens=2**63 - 1, top_k=2**63 - 1, temperature=1.0, top_p=1e-50)
    outputs = engine.generate([[1], [2]], params)
    greedy = engine.generate([[1], [2]], SamplingParams(max_new_tokens=2**63 - 1))
    # A top_p below the likeliest token's mass leaves that token alone.
    assert [output.token_ids for output in outputs] == [output.token_ids for output in greedy]
    assert torch.equal(engine.graphs.step.state.seq_len, torch.zeros(3, dtype=torch.int64))
