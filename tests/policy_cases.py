"""Step times and acceptance for the tests of policies."""

from stepgraph.capture.cost_table import CostTable

KS = range(6)


def table(step=lambda batch, k: 10 + 0.5 * k + 0.02 * batch * (k + 1), ks=KS, batches=(1, 4, 16)) -> CostTable:
    return CostTable({"batch": n, "k": k, "context": 64, "step_ms": step(n, k)} for n in batches for k in ks)


def draws(rates, k, requests, rng):
    """Accepted counts of requests whose position j is accepted with rates[j]."""
    return [next((j for j in range(k) if rng.random() >= rates[j]), k) for _ in range(requests)]
