"""A model's tensors under the names that transformers gives them, and its config.json.

Pure: nothing is read or written here, and Hugging Face's library is not needed. `potluck export
--format hf` writes what this returns: `tensors` into model.safetensors (with the metadata
{"format": "pt"}), `config` into config.json; `GPT2LMHeadModel.from_pretrained(folder)` loads it.

The one thing easy to get wrong: GPT-2's linear layers are stored transposed there, (in, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class HuggingFaceFiles:
    config: dict[str, Any]
    tensors: dict[str, Tensor]


def hf_export(settings: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> HuggingFaceFiles:
    """From the model's plain settings and its state dict.

    NotThisModel, naming what is missing, left over or of another shape, before anything is made;
    WrongSettings for a model that transformers does not have.
    """
    raise NotImplementedError
