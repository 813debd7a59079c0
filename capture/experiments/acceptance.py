"""How many drafts are accepted: by drafter, k, temperature, method of verification and category of prompt.

Every row comes from an engine that generated: greedy text is the same whatever the drafter, so the drafters are compared on
the same positions; sampled text is each drafter's own.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.experiments.prompt_sets import PUBLIC, load_prompts, spread
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.prompts import encode_prompt
from stepgraph.capture.request import RequestOutput, SamplingParams
from stepgraph.capture.stats import acceptance_by_position
from stepgraph.model.checkpoint import CheckpointError, LoadedModel, load_model

MODEL = "smollm2-135m"
PUBLIC_PROMPTS = 32  # of each public set, spread over it
K, OTHER_KS = 3, (1, 2, 4, 5, 6, 7)
# (temperature, verification): greedy is decided alike by both methods.
WAYS = ((0.0, "standard"), (0.8, "standard"), (0.8, "block"))
ALL, OWN = "all", "own"


def acceptance_rows(
    loaded: LoadedModel,
    drafters: Sequence[str],
    ks: Sequence[int],
    ways: Sequence[tuple[float, str]],
    prompt_set: str,
    *,
    prompts: int | None,
    new_tokens: int,
    seed: int,
    batch: int = 8,
) -> Iterator[dict]:
    """A row for each drafter, k, way and category, and one for all categories together.

    Args:
        loaded: the target.
        drafters: see `stepgraph.model.drafters.spec.KNOWN`; one whose weights are missing gives a row with `status` "absent".
        ks: drafts per step.
        ways: (temperature, "standard" or "block").
        prompt_set: see `load_prompts`.
        prompts: how many of each category, None for all.
        new_tokens: most tokens of an answer.
        seed: of the first request.
        batch: requests decoding at once.
    """
    records = sorted(load_prompts(prompt_set), key=lambda record: record.category)
    groups = [list(group) for _, group in groupby(records, lambda record: record.category)]
    chosen = [record for group in groups for record in spread(group, prompts or len(group))]
    ids = [encode_prompt(record.prompt, loaded.tokenizer) for record in chosen]
    max_len = min(max(map(len, ids)) + new_tokens + 1, loaded.model.max_positions)
    for drafter in drafters:
        for k in ks:
            options = EngineOptions(
                MODEL, drafter, k=k, max_batch=min(batch, len(ids)), max_len=max_len, seed=seed, kv_memory_bytes=4 << 30
            )
            try:
                engine = build_engine(options, loaded).engine
            except CheckpointError as error:
                yield {"drafter": drafter, "status": f"absent: {error}"}
                break
            for temperature, verify in ways:
                params = SamplingParams(max_new_tokens=new_tokens, temperature=temperature, verify=verify)
                outputs = engine.generate(ids, params)
                named = list(zip(chosen, outputs, strict=True))
                categories = sorted({record.category for record in chosen})
                for category in (*categories, ALL):
                    part = [output for record, output in named if category in (record.category, ALL)]
                    yield {
                        "drafter": drafter, "status": "ok", "k": k, "temperature": temperature, "verify": verify,
                        "prompt_set": prompt_set, "category": category, "new_tokens": new_tokens, **_counted(part),
                    }  # fmt: skip


def _counted(outputs: Sequence[RequestOutput]) -> dict:
    steps, tokens = sum(output.steps for output in outputs), sum(len(output.token_ids) for output in outputs)
    drafted, accepted = ([sum(at) for at in zip(*each, strict=True)] for each in (
        [output.drafted_at for output in outputs], [output.accepted_at for output in outputs]))  # fmt: skip
    return {
        "prompts": len(outputs),
        "tokens": tokens,
        "request_steps": steps,
        "acceptance_length": round(tokens / steps, 4),
        "drafted_per_step": round(sum(drafted) / steps, 4),
        "accepted_per_step": round(sum(accepted) / steps, 4),
        "per_position": [round(rate, 4) for rate in acceptance_by_position(drafted, accepted)],
    }


def _grid(loaded: LoadedModel, drafters: Sequence[str], public: Sequence[str], seed: int) -> Iterator[dict]:
    options = {"new_tokens": 64, "seed": seed}
    yield from acceptance_rows(loaded, drafters, (K,), WAYS[:1], OWN, prompts=None, **options)
    for name in public:
        try:
            yield from acceptance_rows(loaded, drafters, (K,), WAYS[:1], name, prompts=PUBLIC_PROMPTS, **options)
        except ValueError as error:
            yield {"drafter": f"{name} with all drafters", "status": f"absent: {error}"}
    yield from acceptance_rows(loaded, drafters, (K,), WAYS[1:], OWN, prompts=None, **options)
    yield from acceptance_rows(loaded, drafters, OTHER_KS, WAYS[:1], OWN, prompts=None, **options)


def grid_of(drafters: Sequence[str], public: Sequence[str]) -> Callable[[bool, int], Iterator[dict]]:
    """What an experiment measures, (quick, seed) -> rows: every k, temperature and verification on the own prompts, the k that
    is shown first, and the sets `public` at that k alone; `quick` is the first drafter, one k and a prompt of each category.
    """

    def measure(quick: bool, seed: int) -> Iterator[dict]:
        loaded = load_model(MODEL)
        if quick:
            return acceptance_rows(loaded, drafters[:1], (K,), WAYS[:1], OWN, prompts=1, new_tokens=24, seed=seed)
        return _grid(loaded, drafters, public, seed)

    return measure


measure = grid_of(("ngram", "eagle3", "hybrid"), PUBLIC)


def table(rows: list[dict]) -> Table:
    """Acceptance length by drafter and category at the k with the most categories measured, then by k for all prompts."""
    good = [row for row in rows if row["status"] == "ok"]
    ks = sorted({row["k"] for row in good})
    shown = K if K in ks else ks[-1]
    # Categories of the own set, then a column for each public set, of all its prompts.
    categories = sorted({row["category"] for row in good if row["prompt_set"] not in PUBLIC} - {ALL})
    categories += [name for name in PUBLIC if any(row["prompt_set"] == name for row in good)]
    header = ["drafter", "temperature", "verification", *categories, f"all, k = {shown}", "per position"]
    header += [f"k = {k}" for k in ks if k != shown]
    lines = []
    ways = dict.fromkeys((row["drafter"], row["temperature"], row["verify"]) for row in good)
    for drafter, temperature, verify in ways:
        cells = {
            (row["prompt_set"] if row["prompt_set"] in PUBLIC else row["category"], row["k"]): row
            for row in good
            if (row["drafter"], row["temperature"], row["verify"]) == (drafter, temperature, verify)
        }

        def length(category: str, k: int, cells: dict = cells) -> str:
            return f"{cells[category, k]['acceptance_length']:.2f}" if (category, k) in cells else ""

        positions = " ".join(f"{rate:.2f}" for rate in cells[ALL, shown]["per_position"]) if (ALL, shown) in cells else ""
        by_category = [length(category, shown) for category in (*categories, ALL)]
        by_k = [length(ALL, k) for k in ks if k != shown]
        lines.append([drafter, f"{temperature:g}", verify, *by_category, positions, *by_k])
    absent = sorted({f"{row['drafter']} is {row['status']}" for row in rows if row["status"] != "ok"})
    note = "Tokens a step (accepted drafts + 1); per position: accepted among those drafted there."
    return Table(header, lines, " ".join([note, *(f"{each}." for each in absent)]))


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Acceptance length of each drafter, greedy at k = 3 over all prompts."""
    return [
        (f"tokens a step at k = {K}, greedy, {row['prompts']} prompts of {row['prompt_set']}: {row['drafter']}",
         f"{row['acceptance_length']:.2f}")
        for row in rows
        if row["status"] == "ok" and (row["k"], row["temperature"], row["category"]) == (K, 0.0, ALL)
    ]  # fmt: skip
