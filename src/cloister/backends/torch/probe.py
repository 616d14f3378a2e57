"""What torch there is, for people who look for a fault."""

from __future__ import annotations

import torch


def describe_torch() -> str:
    """Returns torch's version and where it can compute."""
    where = f"CUDA {torch.version.cuda}" if torch.cuda.is_available() else "CPU"
    return f"{torch.__version__}, {where}"
