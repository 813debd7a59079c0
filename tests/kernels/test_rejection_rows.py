"""Rejection sampling row by row: greedy and mixed rows, rows without drafts, broken rows, and neighbours."""

import math

import pytest
import torch
from rejection_cases import drafted, run

from stepgraph.kernels.philox import Stream
from stepgraph.kernels.sampling import draw, token_law

NAN, INF = math.nan, math.inf


def peaked(*tokens: int, vocab: int = 11) -> torch.Tensor:
    """Logits `[1, len(tokens), V]` whose arg-max follows `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab) * 4.0


class TestGreedyRows:
    """Temperature 0: drafts are accepted as long as they are the arg-max, then the arg-max follows."""

    def greedy(self, logits, drafts, **options):
        emitted, accepted = run(logits, torch.tensor([drafts], dtype=torch.int64), temperature=0.0, **options)
        return emitted[0].tolist(), accepted.item()

    def test_perfect_match(self):
        assert self.greedy(peaked(4, 5, 6, 7), [4, 5, 6]) == ([4, 5, 6, 7], 3)

    def test_early_mismatch(self):
        assert self.greedy(peaked(4, 5, 6, 7), [3, 5, 6]) == ([4, -1, -1, -1], 0)

    def test_mismatch_in_the_middle(self):
        assert self.greedy(peaked(4, 5, 6, 7), [4, 5, 0]) == ([4, 5, 6, -1], 2)

    def test_only_the_first_of_several_mismatches_counts(self):
        assert self.greedy(peaked(4, 5, 6, 7, 8), [4, 1, 6, 1]) == ([4, 5, -1, -1, -1], 1)

    @pytest.mark.parametrize("drafts", [[4, 5, -1], [4, -1, -1], [-1, -1, -1], [4, -1, 6], [-1, 5, 6]])
    def test_ragged_drafts(self, drafts):
        """Nothing counts from the first −1 on."""
        count = drafts.index(-1)
        assert self.greedy(peaked(4, 5, 6, 7), drafts) == ([4, 5, 6, 7][: count + 1] + [-1] * (3 - count), count)

    def test_ties_go_to_the_lowest_id(self):
        logits = torch.zeros(1, 2, 5)
        assert self.greedy(logits, [0]) == ([0, 0], 1)
        assert self.greedy(logits, [1]) == ([0, -1], 0)

    def test_a_sampled_draft_law_changes_nothing(self):
        law = torch.full((1, 3, 11), 1 / 11)
        for drafts in ([4, 5, 6], [4, 0, 6], [0, 0, 0], [4, 5, -1]):
            assert self.greedy(peaked(4, 5, 6, 7), drafts, law=law) == self.greedy(peaked(4, 5, 6, 7), drafts)

    def test_against_a_loop(self, fast_law):
        g = torch.Generator().manual_seed(0)
        for k in range(6):
            logits = torch.randint(0, 3, (60, k + 1, 3), generator=g).float()
            drafts = torch.randint(-1, 3, (60, k), generator=g)
            emitted, accepted = run(logits, drafts, temperature=0.0)
            for row in range(60):
                best = [max(range(3), key=lambda v, r=r: (logits[row, r, v].item(), -v)) for r in range(k + 1)]
                count = 0
                while count < k and drafts[row, count] == best[count]:
                    count += 1
                assert accepted[row] == count
                assert emitted[row].tolist() == best[: count + 1] + [-1] * (k - count)


def test_greedy_and_sampled_rows_in_one_batch(assert_law, fast_law):
    """Case 7: temperatures [0, 1, 0.0] over and over; each third of the batch as if it were alone."""
    rows = 9000
    base_logits = torch.tensor([[1.0, 0.5, 1.25, -1.0, 1.25], [0.0, 2.0, 0.0, 1.0, 0.5]])
    logits = base_logits.expand(rows, 2, 5)
    q = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.2]).expand(rows, 5)
    drafts = drafted(q)[:, None]
    temperature = torch.tensor([0.0, 1.0, 0.0]).repeat(rows // 3)
    emitted, accepted = run(logits, drafts, q[:, None], temperature=temperature)
    greedy = temperature == 0
    assert (emitted[greedy, 0] == 2).all()
    assert torch.equal(accepted[greedy] == 1, drafts[greedy, 0] == 2)
    assert (emitted[greedy & (accepted == 1), 1] == 1).all()
    assert_law(emitted[~greedy, 0], base_logits[0].double().softmax(-1))
    assert_law(emitted[~greedy & (accepted == 1), 1], base_logits[1].double().softmax(-1))


@pytest.mark.parametrize("law", [None, torch.zeros(90, 0, 7)], ids=["one-hot", "sampled"])
def test_without_drafts_it_is_plain_sampling(law):
    """k = 0, token for token."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(90, 1, 7, generator=g)
    temperature = torch.tensor([0.0, 0.8, 1.2]).repeat(30)
    options = (temperature, torch.tensor([0, 0, 4]).repeat(30), torch.tensor([1.0, 0.9, 1.0]).repeat(30), torch.zeros(90))
    base = torch.arange(90) + 3
    emitted, accepted = run(
        logits,
        torch.zeros(90, 0, dtype=torch.int64),
        law,
        temperature=temperature,
        top_k=options[1],
        top_p=options[2],
        base=base,
    )
    plain = draw(token_law(logits[:, 0], *options), torch.arange(90), base + 1, base, int(Stream.TARGET))
    assert torch.equal(emitted[:, 0], plain)
    assert (accepted == 0).all()


def test_rows_without_a_draft_equal_plain_sampling_token_for_token():
    """Case 18 at the op: padded to k = 3 with "no draft", whatever law lies in the unused columns."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(60, 4, 7, generator=g)
    plain, _ = run(logits[:, :1], torch.zeros(60, 0, dtype=torch.int64))
    logits[:, 1:] = NAN
    for law in (None, torch.full((60, 3, 7), NAN)):
        emitted, accepted = run(logits, torch.full((60, 3), -1), law)
        assert torch.equal(emitted[:, :1], plain)
        assert (accepted == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits(temperature):
    """Case 8, V = 10: in the vocabulary, right where there is a right token, neighbours unchanged."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 4, 10, generator=g) * 2
    law = torch.rand(6, 3, 10, generator=g).softmax(-1)
    drafts = torch.randint(0, 10, (6, 3), generator=g)
    clean_emitted, clean_accepted = run(logits, drafts, law, temperature=temperature)
    logits[1] = NAN
    logits[2, :, 0] = NAN
    logits[3] = -INF
    logits[3, :, 7] = 1.0
    logits[4, :, 3] = INF
    emitted, accepted = run(logits, drafts, law, temperature=temperature)  # checks the vocabulary
    assert torch.equal(emitted[[0, 5]], clean_emitted[[0, 5]])
    assert torch.equal(accepted[[0, 5]], clean_accepted[[0, 5]])
    assert 0 not in emitted[2].tolist()
    assert set(emitted[3].tolist()) <= {7, -1}
    assert set(emitted[4].tolist()) <= {3, -1}


def world(rows: int = 8, k: int = 3, vocab: int = 13):
    g = torch.Generator().manual_seed(6)
    law = (torch.randn(rows, k, vocab, generator=g)).softmax(-1)
    drafts = torch.randint(0, vocab, (rows, k), generator=g)
    drafts[2, 1:] = -1
    drafts[5] = -1
    return {
        "logits": torch.randn(rows, k + 1, vocab, generator=g),
        "drafts": drafts,
        "law": law,
        "temperature": torch.tensor([0.9, 0.0, 1.0, 0.7, 1.3, 0.9, 0.0, 2.0]),
        "top_k": torch.tensor([0, 0, 5, 0, 0, 3, 2, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.8, 1.0, 1.0, 0.5, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2]),
        "seed": torch.tensor([42, 42, 7, 2**40, -5, 42, 0, 1]),
        "base": torch.tensor([9, 9, 100, 3, 50, 9, 0, 7]),
    }


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_request_does_not_see_its_neighbours(one_hot):
    """Case 9: alone, among 1 to 7 others, in another row, padded to 16 with NaN rows: the same tokens."""
    inputs = world()
    if one_hot:
        inputs["law"] = None

    def at(index):
        picked = {name: value if value is None else value[index] for name, value in inputs.items()}
        return run(picked.pop("logits"), picked.pop("drafts"), picked.pop("law"), **picked)

    emitted, accepted = at(torch.arange(8))
    for index in [*(torch.arange(n) for n in range(1, 8)), *(torch.tensor([r]) for r in range(8)), torch.arange(7, -1, -1)]:
        some_emitted, some_accepted = at(index)
        assert torch.equal(some_emitted, emitted[index])
        assert torch.equal(some_accepted, accepted[index])

    for name in inputs:
        if inputs[name] is not None:
            inputs[name] = torch.cat([inputs[name], inputs[name]])
    inputs["logits"][8:] = NAN
    inputs["drafts"][8:] = -1
    padded_emitted, padded_accepted = at(torch.arange(16))
    assert torch.equal(padded_emitted[:8], emitted)
    assert torch.equal(padded_accepted[:8], accepted)


def test_the_same_inputs_at_other_positions_draw_anew():
    """Case 9: 100 steps of one request over fixed logits do not repeat themselves."""
    rows = 100
    logits, drafts = torch.zeros(rows, 3, 1000), torch.full((rows, 2), -1)
    emitted, _ = run(logits, drafts, seed=42, base=torch.arange(rows))
    assert len(set(emitted[:, 0].tolist())) > 85  # 95 of 1000 expected for independent draws
    again, _ = run(logits, drafts, seed=42, base=torch.arange(rows))
    assert torch.equal(again, emitted)


def test_inputs_are_left_alone():
    inputs = world()
    copies = {name: value.clone() for name, value in inputs.items()}
    arguments = dict(inputs)
    run(arguments.pop("logits"), arguments.pop("drafts"), arguments.pop("law"), **arguments)
    for name, value in inputs.items():
        assert torch.equal(value, copies[name]), name
