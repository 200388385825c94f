"""One short value for all parameters and buffers of a model, to compare between machines.

    digest_of({name: tensor, ...})      # "5f0c1f6e…", 32 hexadecimal digits

Two peers with the same digest have the same bits in the same tensors, under the same names: what
people look at when they ask whether a run holds together. What goes over the wire is proven with
digests of the whole state (protocols/accumulation/state_manifest.py); this one leaves out the
optimizer's part.

Easy to get wrong: the bytes, and not the values, are compared: 0.0 and -0.0 are not the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from blake3 import blake3
from torch import Tensor

from protocols.tensors import raw_bytes

DIGEST_BYTES = 16  # nobody searches for two models with the same one


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Of these tensors, whatever their order and their device."""
    whole = blake3()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        whole.update(raw_bytes(tensor))
    return whole.hexdigest(DIGEST_BYTES)
