"""Which dtype a sum is carried in."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64, every smaller float type accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
