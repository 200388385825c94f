"""One short value for all parameters and buffers of a model, to compare between machines.

    digest_of({name: tensor, ...})      # "5f0c1f6e…", 32 hexadecimal digits

Two peers with the same digest have the same bits in the same tensors, under the same names: people
compare it to see whether a run holds together. Transfers are verified with digests of the whole
state (protocols/accumulation/state_manifest.py); this one leaves out the optimizer's part.

The bytes are compared, not the values: 0.0 and -0.0 differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3
from torch import Tensor

from protocols.tensors import TensorReader

DIGEST_BYTES = 16  # enough, as nobody searches for two models with one digest


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """The digest of these tensors, whatever their order and their device."""
    whole, reader = blake3(), TensorReader()
    for name in sorted(tensors):
        tensor = tensors[name]
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        for part in reader.parts(tensor):
            whole.update(part)
    return whole.hexdigest(DIGEST_BYTES)
