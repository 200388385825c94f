"""Tensors as one vector, and values that may not be in it."""

from __future__ import annotations

import pytest
import torch

from protocols.errors import ProtocolMisuse
from protocols.moshpit.layout import LARGEST_AVERAGED, LARGEST_CARRIED, Layout, Segment, Vector
from protocols.tensors import CODECS, CodecName, NotFinite
from protocols.tensors.messages import encode

NAN, INFINITY = float("nan"), float("inf")


def test_tensors_come_back_as_they_were_put_in() -> None:
    tensors = {
        "weight": torch.randn(3, 5),
        "bias": torch.randn(7, dtype=torch.float64),
        "half": torch.randn(2, 2).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 4),
    }
    vector = Vector.of(tensors, codec={"weight": "float16"})
    assert [(one.name, one.values, one.codec) for one in vector.layout.segments] == [
        ("weight", 15, "float16"),
        ("bias", 7, "none"),
        ("half", 4, "none"),
        ("scalar", 1, "none"),
        ("none", 0, "none"),
    ]
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    vector.unpack(vector.values, back)
    for name, tensor in tensors.items():
        torch.testing.assert_close(back[name], tensor.float().to(tensor.dtype), rtol=0, atol=0)


def test_parameters_are_copied_without_their_history_and_written_in_place() -> None:
    layer = torch.nn.Linear(4, 2)
    vector = Vector.of(layer.named_parameters())
    assert not vector.values.requires_grad
    vector.unpack(torch.ones(vector.layout.values), dict(layer.named_parameters()))
    assert bool((layer.weight == 1.0).all())


def test_a_tensor_that_is_not_contiguous_keeps_its_order() -> None:
    columns = torch.arange(6.0).view(2, 3).t()
    assert Vector.of({"t": columns}).values.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("codec", "bad"),
    [
        *((codec, bad) for codec in CODECS for bad in (NAN, INFINITY, -INFINITY)),
        ("none", LARGEST_AVERAGED * 1.01),
        ("float16", 65_520.0),
        ("float64", 1.76 * 2.0**1023),
    ],
)
def test_a_value_that_cannot_be_carried_is_named(codec: CodecName, bad: float) -> None:
    tensors = {"before": torch.ones(40_000), "loss": torch.ones(5).double(), "after": torch.ones(3)}
    tensors["loss"][2] = bad
    with pytest.raises(NotFinite, match=r"^loss has 1 values .* at 2 of 5"):
        Vector.of(tensors, codec).check_finite()


@pytest.mark.parametrize("codec", CODECS)
def test_values_that_pass_the_check_can_be_encoded(codec: CodecName) -> None:
    largest = LARGEST_CARRIED[codec]
    vector = Vector.of({"t": torch.tensor([largest, -largest], dtype=torch.float64)}, codec)
    vector.check_finite()
    encode(vector.values, codec, name="t")


def test_a_vector_is_float64_if_one_of_its_tensors_is_to_be() -> None:
    tensors = {"a": torch.tensor([1 / 3], dtype=torch.float64), "b": torch.tensor([0.5])}
    vector = Vector.of(tensors, codec={"a": "float64"})
    assert vector.values.tolist() == [1 / 3, 0.5]
    assert [one.codec for one in vector.layout.segments] == ["float64", "float64"]
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    vector.unpack(vector.values, back)
    assert torch.equal(back["a"], tensors["a"])
    with pytest.raises(ProtocolMisuse, match="b has the codec float16"):
        Vector.of(tensors, codec={"a": "float64", "b": "float16"})
    with pytest.raises(ProtocolMisuse, match=r"must be float64, not torch\.float32"):
        Vector(vector.layout, vector.values.float())


def test_tensors_that_do_not_fit_the_layout_are_a_misuse() -> None:
    layout = Layout((Segment("t", 4),))
    for values in (
        torch.zeros(5),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(8)[::2],
    ):
        with pytest.raises(ProtocolMisuse):
            Vector(layout, values)
    with pytest.raises(ProtocolMisuse, match="int64"):
        Vector.of({"steps": torch.tensor([1, 2])})
    with pytest.raises(ProtocolMisuse, match="nowhere"):
        Vector.of({"t": torch.zeros(4)}, codec={"nowhere": "none"})
    vector = Vector(layout, torch.zeros(4))
    with pytest.raises(ProtocolMisuse):
        vector.unpack(torch.zeros(4), {"other": torch.zeros(4)})
    with pytest.raises(ProtocolMisuse):
        vector.unpack(torch.zeros(4), {"t": torch.zeros(5)})
