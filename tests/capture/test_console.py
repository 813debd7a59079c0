"""What the commands show."""

import io

from stepgraph.capture.console import OrderedStream, progress, stats_table
from stepgraph.capture.stats import EngineStats

GRAPHS = {"captures": 1, "capture_s": 0.5, "graph_hits": 3, "graph_misses": 0}


def test_acceptance_never_stands_alone():
    """Case 45: acceptance length, drafted and accepted per step are on one line; no lone "acceptance rate"."""
    stats = EngineStats(2, steps=3, request_steps=4, tokens=10, drafted_at=[4, 4], accepted_at=[4, 2], elapsed_s=2.0)
    out = io.StringIO()
    stats_table(stats.report() | GRAPHS, out)
    (line,) = [line for line in out.getvalue().splitlines() if line.startswith("acceptance length")]
    assert "2.50 tokens a step (2.00 drafted, 1.50 accepted)" in line
    assert "%" not in out.getvalue()


def test_nothing_measured_prints_dashes():
    out = io.StringIO()
    stats_table(EngineStats(2).report() | GRAPHS, out)
    assert "– tokens a step (– drafted, – accepted)" in out.getvalue()


def test_texts_come_in_order_and_whole():
    out = io.StringIO()
    stream = OrderedStream(["a", "b", "c"], out)
    for index, piece in ((1, "B1"), (0, "A1"), (2, "C1"), (0, "A2"), (1, "B2")):
        stream.text(index, piece)
    stream.finish(2)
    assert out.getvalue() == "\na\nA1A2"
    stream.finish(0)
    assert out.getvalue() == "\na\nA1A2\n\nb\nB1B2"
    stream.text(1, "B3")
    stream.finish(1)
    assert out.getvalue() == "\na\nA1A2\n\nb\nB1B2B3\n\nc\nC1\n"


def test_bar_is_silent_when_piped(capsys):
    assert list(progress(range(3), "doing", "thing")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")
