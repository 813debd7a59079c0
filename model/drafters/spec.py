"""The one place that reads a drafter's name."""

import re
from dataclasses import dataclass, replace
from typing import Self

KNOWN = (
    "none, ngram, ngram:MIN-MAX, early-exit:N, draft-model:NAME_OR_PATH, eagle3, eagle3:DIRECTORY, eagle3:random, "
    "hybrid, hybrid:MIN, hybrid:MIN:early-exit:N, hybrid:MIN:eagle3:DIRECTORY"
)
DEFAULT = "hybrid where a head is shipped for the model, else ngram"  # of `stepgraph.model.drafters.default_drafter`
HELP = f"{KNOWN} (default: {DEFAULT})"
LONGEST_MATCH = 4  # looked for by default
# Tokens that have to match before the look-up's proposal is taken instead of the other drafter's.
HYBRID_MATCH = 3


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter's name, read. `kind` is none, ngram, early-exit, draft-model, eagle3 or hybrid.

    Attributes:
        kind: which drafter.
        matches: ngram, hybrid: shortest and longest suffix looked for.
        num_layers: early-exit: layers that draft.
        model: draft-model: name or path.
        head: eagle3: directory of the head, "random" for random weights, "" for the one shipped for the target.
        other: hybrid: the drafter of rows without a match.
    """

    kind: str
    matches: tuple[int, int] = (2, LONGEST_MATCH)
    num_layers: int = 0
    model: str = ""
    head: str = ""
    other: "DrafterSpec | None" = None

    @classmethod
    def parse(cls, spec: str) -> Self:
        """Read one of `KNOWN`; a ValueError for anything else."""
        read = cls._read(spec) if isinstance(spec, str) else None
        if read is None:
            raise ValueError(f"drafter is {spec!r}; known are {KNOWN}")
        return read

    @classmethod
    def _read(cls, spec: str) -> Self | None:
        kind, _, option = spec.partition(":")
        if spec in ("none", "ngram", "eagle3"):
            return cls(spec)
        if kind == "ngram" and (match := re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", option)):
            low, high = map(int, match.groups())
            return cls(kind, matches=(low, high)) if 1 <= low <= high else None
        if kind == "early-exit" and re.fullmatch(r"[0-9]{1,4}", option):
            return cls(kind, num_layers=int(option))
        if kind == "draft-model" and option:
            return cls(kind, model=option)
        if kind == "eagle3" and option:
            return cls(kind, head=option)
        if match := re.fullmatch(r"hybrid(?::([1-9][0-9]?)(?::(.+))?)?", spec):
            low = int(match[1] or HYBRID_MATCH)
            other = cls._read(match[2] or "eagle3")
            # A draft model keeps the cache rows of its own proposals, which here need not be the ones that were verified.
            if other is not None and other.kind in ("early-exit", "eagle3"):
                return cls("hybrid", matches=(low, max(low, LONGEST_MATCH)), other=other)
        return None

    @property
    def modelled(self) -> "DrafterSpec":
        """The part of it that runs a model: a hybrid's other drafter, else itself."""
        return self.other or self

    def with_layers(self, num_layers: int) -> "DrafterSpec":
        """The same with another number of early-exit layers."""
        if self.other is not None:
            return replace(self, other=self.other.with_layers(num_layers))
        return replace(self, num_layers=num_layers)
