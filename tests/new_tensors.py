"""The tensors that torch makes in the host's memory, for tests of what a path takes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class NewTensors(TorchFunctionMode):
    """Notes the bytes of each that this thread makes within the block; of a view, none.

    with NewTensors() as made: ...
    assert max(made.sizes) <= 1 << 20
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in _on_host((args, kwargs))}
        for one in _on_host(result):
            if one.untyped_storage().data_ptr() not in known:
                self.sizes.append(one.nbytes)
        return result


def _on_host(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.device.type == "cpu":
            yield tree
    elif isinstance(tree, dict):
        yield from _on_host(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for one in tree:
            yield from _on_host(one)
