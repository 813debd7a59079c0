"""What the commands show: streamed text, progress bars, tables, exit statuses."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm


def progress(items: Iterable, description: str, unit: str, total: int | None = None):
    """`items` behind a progress bar on stderr that vanishes when done, and is absent when stderr is not a terminal.

    `total` is how many, for items without a length.
    """
    hidden = not sys.stderr.isatty()
    return tqdm(items, desc=description, unit=unit, total=total, leave=False, file=sys.stderr, disable=hidden)


def report(document: dict, path: str | None, show: Callable[[TextIO], None]) -> None:
    """Show a result to a person and write it as JSON to `path`; with "-" the JSON is all of stdout, and `show` gets stderr."""
    if path not in (None, "-"):  # kept before anything can go wrong with a terminal
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(sys.stderr if path == "-" else sys.stdout)
    if path == "-":
        print(json.dumps(document))


class OrderedStream:
    """Streams the texts of requests that run side by side one after the other: the first unfinished one live, the others
    held back until their turn.

    Args:
        titles: a line to print before each text, by request in order; "" prints none.
        out: where to.
    """

    def __init__(self, titles: list[str], out: TextIO):
        self.titles, self.out = titles, out
        self._held = [""] * len(titles)
        self._done = [False] * len(titles)
        self._turn = 0
        self._begin()

    def text(self, index: int, piece: str) -> None:
        if index == self._turn:
            self._write(piece)
        else:
            self._held[index] += piece

    def finish(self, index: int) -> None:
        self._done[index] = True
        while self._turn < len(self.titles) and self._done[self._turn]:
            self._write("\n")
            self._turn += 1
            self._begin()

    def _begin(self) -> None:
        if self._turn < len(self.titles):
            title = self.titles[self._turn]
            self._write((f"\n{title}\n" if title else "") + self._held[self._turn])

    def _write(self, text: str) -> None:
        if text:
            self.out.write(text)
            self.out.flush()


def shown(value: float | None, digits: int = 2) -> str:
    """A number for a table; "–" for None."""
    return "–" if value is None else f"{value:.{digits}f}"


def stats_table(stats: dict, out: TextIO) -> None:
    """Print the figures of `Engine.report`. Acceptance length, drafted and accepted per step stand together: alone, each can
    mislead.
    """
    table = Table(show_header=False, box=None, pad_edge=False)
    positions = "  ".join(f"{rate:.2f}" for rate in stats["per_position_acceptance"]) or "–"
    for name, value in (
        ("tokens", f"{stats['tokens']} in {stats['steps']} steps, {shown(stats['tokens_per_s'], 1)} tokens/s"),
        (
            "acceptance length",
            f"{shown(stats['acceptance_length'])} tokens a step "
            f"({shown(stats['drafted_per_step'])} drafted, {shown(stats['accepted_per_step'])} accepted)",
        ),
        ("acceptance by position", positions),
        ("TTFT, TPOT", f"{shown(stats['ttft_ms'], 0)} ms, {shown(stats['tpot_ms'], 1)} ms"),
        (
            "graphs",
            f"{stats['captures']} captured in {stats['capture_s']:.1f} s, "
            f"{stats['graph_hits']} replays, {stats['graph_misses']} misses",
        ),
    ):
        table.add_row(name, value)
    if stats["repaired_rows"]:
        table.add_row("non-finite logits", f"{stats['repaired_rows']} rows")
    Console(file=out, width=max(80, Console(file=out).width)).print(table)


def graphs_table(rows: list[dict], out: TextIO) -> None:
    """Print `StepGraphs.rows`: what each captured graph took, holds, and how often it ran."""
    table = Table(box=None, pad_edge=False)
    for name in ("batch", "k", "nodes", "MiB", "capture s", "replays"):
        table.add_column(name, justify="right")
    for row in rows:
        nodes = "–" if row["nodes"] is None else str(row["nodes"])
        mebibytes, capture_s = shown(row["bytes"] / 2**20, 1), shown(row["capture_s"])
        table.add_row(str(row["batch"]), str(row["k"]), nodes, mebibytes, capture_s, str(row["replays"]))
    Console(file=out, width=max(80, Console(file=out).width)).print(table)
