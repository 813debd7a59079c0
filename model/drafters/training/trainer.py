"""The training loop: batches of texts, the target's hidden states, the head unrolled, one optimiser step each."""

import math
import os
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from stepgraph.model.drafters.training.corpus import Batch, Corpus
from stepgraph.model.drafters.training.dense import target_forward
from stepgraph.model.drafters.training.hidden_store import HiddenStore
from stepgraph.model.drafters.training.loss import Teacher, soft_cross_entropy, teacher_of
from stepgraph.model.drafters.training.unroll import shifted, unroll
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.transformer import Transformer

DECAY = 0.8  # weight of pass s is DECAY ** s, as in the published recipe
WARM_UP = 0.03  # share of the budget
SAVE_EVERY_S = 120.0


@dataclass(frozen=True)
class TrainOptions:
    """What shapes a run; two runs with the same options, corpus and token budget give the same head on one machine.

    Attributes:
        passes: unrolled passes (1 + further drafts).
        batch_tokens: tokens in a batch, padding counted.
        lr: largest learning rate, of AdamW; a cosine down to a tenth of it over the budget.
        frozen_head: the output matrix stays what it is (of a new head: the target's own rows).
        epochs: token budget as a multiple of the corpus, where `train_tokens` is None.
        train_tokens: tokens to train on.
        minutes: wall time to stop at, None for no limit; the learning rate then follows the clock, and runs differ.
        seed: of the order of texts.
        store_hidden: compute the target's hidden states once, and keep them in a file in bfloat16 (for SmolLM2-135M 4.6 KB a
            token), instead of in every epoch.
    """

    passes: int = 3
    batch_tokens: int = 4096
    lr: float = 1e-3
    frozen_head: bool = True
    epochs: float = 3.0
    train_tokens: int | None = None
    minutes: float | None = None
    seed: int = 0
    store_hidden: bool = False


class Measured(NamedTuple):
    """Means over rows of each pass: loss in nats, and how often the likeliest token is the target's likeliest in the
    draft vocabulary.
    """

    loss: list[float]
    accuracy: list[float]
    rows: int


class Trainer:
    """Trains `head` (float32 weights) for `target` (any dtype, frozen) on a corpus; `state` is where it can resume from."""

    def __init__(self, target: Transformer, head: Eagle3Head, corpus: Corpus, options: TrainOptions, state: Path):
        self.target, self.head, self.corpus, self.options, self.state = target, head, corpus, options, state
        width = head.fc_weight.shape[1] + target.config.hidden_size
        self.store = HiddenStore(state.with_name("hidden.bin"), corpus, width) if options.store_hidden else None
        held_out = set(corpus.held_out())
        self.trained_on = [i for i in range(len(corpus.texts)) if i not in held_out] or sorted(held_out)
        each = sum(len(corpus.texts[i].tokens) for i in self.trained_on)
        self.budget = options.train_tokens or int(options.epochs * each)
        weights = [weight for name, weight in head.named_parameters() if name != "embed"]
        self.weights = [weight for weight in weights if not (options.frozen_head and weight is head.lm_head)]
        for weight in self.weights:
            weight.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.weights, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps, self.tokens, self.elapsed_s, self.epoch, self.batch_in_epoch = 0, 0, 0.0, 0, 0
        self.output_rows = target.output_rows.data[head.target_ids]

    def run(self, progress: bool = True) -> None:
        """Train until the budget is spent. Interrupted, it leaves its state behind; run again, it goes on from there."""
        self._resume()
        saved_s, start_s, before_s = time.perf_counter(), time.perf_counter(), self.elapsed_s
        bar = tqdm(total=self.budget, initial=self.tokens, unit="tok", unit_scale=True, desc="training", disable=not progress)
        smooth: list[float] | None = None
        try:
            while self._spent() < 1:
                order = list(self.corpus.batches(self.trained_on, self.options.batch_tokens, self._rng()))
                for batch in order[self.batch_in_epoch :]:
                    measured = self._step(batch)
                    self.batch_in_epoch += 1
                    self.elapsed_s = before_s + time.perf_counter() - start_s
                    shown = [measured.loss[0], *measured.accuracy]
                    smooth = shown if smooth is None else [0.95 * a + 0.05 * b for a, b in zip(smooth, shown, strict=True)]
                    bar.update(int(batch.lengths.sum()))
                    bar.set_postfix_str(f"loss {smooth[0]:.2f}, accuracy " + " ".join(f"{rate:.2f}" for rate in smooth[1:]))
                    if time.perf_counter() - saved_s > SAVE_EVERY_S:
                        self.save()
                        saved_s = time.perf_counter()
                    if self._spent() >= 1:
                        break
                else:
                    self.epoch, self.batch_in_epoch = self.epoch + 1, 0
        finally:
            self.save()
            bar.close()

    @torch.no_grad()
    def measure(self, index: list[int]) -> Measured:
        """Loss and accuracy by pass over texts of the corpus."""
        totals = [[0.0, 0, 0] for _ in range(self.options.passes)]
        for batch in self.corpus.batches(index, self.options.batch_tokens, None):
            for total, (loss, hits, rows) in zip(totals, self._forward(batch), strict=True):
                total[0] += float(loss)
                total[1] += int(hits)
                total[2] += rows
        return _means(totals)

    def save(self) -> None:
        """Everything that `run` needs to go on, written whole or not at all."""
        kept = {
            "options": asdict(self.options), "corpus": (self.corpus.shards, len(self.corpus.texts)), "steps": self.steps,
            "tokens": self.tokens, "elapsed_s": self.elapsed_s, "epoch": self.epoch, "batch_in_epoch": self.batch_in_epoch,
            "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(), "target_ids": self.head.target_ids,
        }  # fmt: skip
        partial = self.state.with_suffix(".partial")
        torch.save(kept, partial)
        os.replace(partial, self.state)

    def _resume(self) -> None:
        if not self.state.exists():
            return
        kept = torch.load(self.state, map_location=self.head.device, weights_only=True)
        same = {**kept["options"], "minutes": None} == {**asdict(self.options), "minutes": None}
        if not same or tuple(kept["corpus"]) != (self.corpus.shards, len(self.corpus.texts)):
            raise ValueError(f"{self.state} is of a run with other options or other data; remove it to train anew")
        self.head.load_state_dict(kept["head"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for name in ("steps", "tokens", "elapsed_s", "epoch", "batch_in_epoch"):
            setattr(self, name, kept[name])

    def _rng(self) -> random.Random:
        return random.Random(f"{self.options.seed}/{self.epoch}")

    def _spent(self) -> float:
        minutes = self.options.minutes
        return max(self.tokens / self.budget, self.elapsed_s / 60 / minutes if minutes else 0.0)

    def _step(self, batch: Batch) -> Measured:
        spent = self._spent()
        rate = min(1.0, (spent + 1e-3) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, spent)))
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * rate
        passes = self._forward(batch)
        loss = sum(DECAY**number * loss / max(rows, 1) for number, (loss, _, rows) in enumerate(passes))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights, 0.5)
        self.optimizer.step()
        self.steps += 1
        self.tokens += int(batch.lengths.sum())
        return _means([[float(loss.detach()), int(hits), rows] for loss, hits, rows in passes])

    def _states(self, batch: Batch, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Final hidden states and features of a batch, `[B, T, ..]`, in the target's dtype."""
        kept = self.store.get(batch) if self.store is not None else None
        if kept is None:
            kept = torch.cat(target_forward(self.target, tokens, self.head.eagle.feature_layers), -1)
            if self.store is not None:
                # Rounded at the first use as at every later one, so that it does not matter where a run was interrupted.
                kept = kept.to(torch.bfloat16)
                self.store.put(batch, kept)
        hidden = self.target.config.hidden_size
        return tuple(kept.to(tokens.device, self.target.dtype).split([hidden, kept.shape[-1] - hidden], -1))

    def _forward(self, batch: Batch) -> list[tuple[Tensor, Tensor, int]]:
        """Summed loss, agreements and the number of rows of each pass."""
        device, head = self.target.device, self.head
        tokens = batch.tokens.to(device)
        at = torch.arange(tokens.shape[1], device=device)
        with torch.no_grad():
            hidden, features = self._states(batch, tokens)
            # The law after position p is wanted where the token at p + 1 is the target's own.
            wanted = ((at >= batch.prompt_lens[:, None].to(device) - 1) & (at < batch.lengths[:, None].to(device))).flatten()
            place = wanted.cumsum(0) - 1
            teacher = teacher_of(hidden.flatten(0, 1)[wanted], self.output_rows)
        embed = self.target.embed if head.embed is None else head.embed
        passes = []
        for number, output in enumerate(unroll(head, features, tokens, embed, self.options.passes)):
            # Row i is about the law after position i + number + 1.
            shape = batch.tokens.shape
            rows = shifted(wanted.view(shape), number + 1).flatten()
            of = shifted(place.view(shape), number + 1).flatten()[rows]
            law = Teacher(teacher.ids[of], teacher.probs[of])
            loss, hits = soft_cross_entropy(output.flatten(0, 1)[rows], head.lm_head, law)
            passes.append((loss, hits, len(of)))
        return passes


def _means(totals: list) -> Measured:
    return Measured(
        [total[0] / max(total[2], 1) for total in totals], [total[1] / max(total[2], 1) for total in totals], totals[0][2]
    )
