"""A small training of a head for a toy target."""


def arguments(out, **changes) -> list[str]:
    """Of `train_eagle3`, with the folder to write to and options changed or added."""
    options = {
        "target": "random:tiny-llama", "out": out, "max-tokens": 3000, "rows": 16, "shard-texts": 24, "max-len": 60,
        "draft-vocab": 120, "batch-tokens": 512, "train-tokens": 20_000, "device": "cpu", "dtype": "float32", "lr": 3e-3,
    }  # fmt: skip
    return [part for name, value in (options | changes).items() for part in (f"--{name}", str(value))]
