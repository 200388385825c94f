"""The packages that potluck can do without, and how to install one."""

from __future__ import annotations

import sys
from typing import Final

PACKAGES: Final = {
    "datasets": "datasets",
    "images": "pillow",
    "mlflow": "mlflow-skinny>=3",
    "parquet": "pyarrow",
    "tensorboard": "tensorboard",
    "transformers": "transformers>=5",
    "wandb": "wandb>=0.31",
}
"""By the name of the extra in pyproject.toml. The others are for those who work on potluck."""


def install(extra: str) -> str:
    """The advice for somebody who needs this extra."""
    return (
        f"Install it where potluck is: {sys.executable} -m pip install '{PACKAGES[extra]}'. "
        f'If uv or pipx has installed potluck, see docs/organisers.md, "Extras" ({extra}).'
    )
