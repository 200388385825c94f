"""One flat buffer holds the mean gradient of all samples since the last round."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from protocols.accumulation import accumulator
from protocols.accumulation.accumulator import (
    LOSS,
    OVERFLOWED,
    USED,
    Accumulator,
    FoundWrong,
)
from protocols.accumulation.parameters import Codecs, Parameters
from protocols.errors import ProtocolMisuse
from protocols.tensors import record
from tests.devices import DEVICES


def parameters(dtype: torch.dtype = torch.float64) -> Parameters:
    return Parameters(
        [
            ("weight", nn.Parameter(torch.zeros(2, 3, dtype=dtype))),
            ("bias", nn.Parameter(torch.zeros(3, dtype=dtype))),
        ]
    )


def set_gradients(to: Parameters, *gradients: Tensor | None) -> None:
    for one, gradient in zip(to.tensors, gradients, strict=True):
        one.grad = gradient


def of(value: float, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.full((2, 3), value, dtype=dtype), torch.full((3,), -value, dtype=dtype)


def test_batches_count_by_their_samples() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    for value, samples in ((1.0, 10), (4.0, 20), (7.0, 30)):
        set_gradients(own, *of(value))
        assert accumulator.add(samples) is None
    taken = accumulator.take()
    assert taken.samples == 60
    expected = (10 * 1.0 + 20 * 4.0 + 30 * 7.0) / 60
    torch.testing.assert_close(taken.values[:6], torch.full((6,), expected, dtype=torch.float64))
    torch.testing.assert_close(taken.values[6:9], torch.full((3,), -expected, dtype=torch.float64))


def test_gradients_may_be_overwritten_as_soon_as_they_are_counted() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    weight, bias = of(2.0)
    set_gradients(own, weight, bias)
    accumulator.add(8)
    weight.fill_(99.0)
    assert accumulator.take().values[:6].tolist() == [2.0] * 6


def test_a_parameter_without_a_gradient_counts_as_zeros_and_says_how_often_it_had_one() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, of(3.0)[0], None)
    accumulator.add(10)
    set_gradients(own, *of(3.0))
    accumulator.add(30)
    values = accumulator.take().values
    assert values[:6].tolist() == [3.0] * 6
    assert values[6:9].tolist() == [-3.0 * 30 / 40] * 3
    assert values[9:].tolist() == [1.0, 0.75, 0.0, 0.0, 0.0]  # used, used, loss, known, overflowed


def test_a_round_that_failed_leaves_its_samples_with_those_that_came_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{Accumulator.__module__}.STAGED_VALUES", 4)  # of nine, piece by piece
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(1.0))
    accumulator.add(10)
    taken = accumulator.take()
    set_gradients(own, *of(5.0))
    accumulator.add(30)
    accumulator.put_back(taken)
    again = accumulator.take()
    assert again.samples == 40
    assert again.values[:6].tolist() == pytest.approx([(10 * 1.0 + 30 * 5.0) / 40] * 6, rel=1e-15)


def test_dropped_gradients_are_not_in_the_next_mean() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(1.0))
    accumulator.add(10)
    accumulator.drop()
    set_gradients(own, *of(5.0))
    accumulator.add(1)
    assert accumulator.take().values[0] == 5.0


def test_a_peer_without_samples_brings_zeros() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(1.0))
    accumulator.add(1)
    accumulator.done_with(accumulator.take())
    taken = accumulator.take()
    assert taken.samples == 0
    assert not taken.values.any()


def test_two_buffers_are_all_that_is_ever_taken() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    places = set()
    for _ in range(5):
        set_gradients(own, *of(1.0))
        accumulator.add(1)
        taken = accumulator.take()
        accumulator.add(1)
        places.add(taken.values.data_ptr())
        accumulator.done_with(taken)
    assert len(places) == 2


def test_a_failed_round_takes_no_memory_for_what_it_gives_back() -> None:
    """There was a second buffer from then on, for good."""
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(1.0))
    accumulator.add(4)
    taken = accumulator.take()
    accumulator.put_back(taken)
    again = accumulator.take()
    assert again.values.data_ptr() == taken.values.data_ptr()
    assert again.samples == 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_gradients_that_are_not_finite_are_named_and_add_nothing(bad: float) -> None:
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(1.0))
    accumulator.add(4)
    weight, bias = of(2.0)
    bias[1] = bad
    set_gradients(own, weight, bias)
    assert accumulator.add(4) == "bias"
    taken = accumulator.take()
    assert taken.samples == 4
    assert taken.values[:6].tolist() == [1.0] * 6


def test_values_that_the_codec_cannot_carry_are_named() -> None:
    own = parameters(torch.float32)
    codecs: Codecs = {"weight": "float16"}
    accumulator = Accumulator(own, codecs)
    set_gradients(own, *of(70_000.0, torch.float32))
    assert accumulator.add(4) == "weight"
    assert [one.codec for one in accumulator.layout.segments] == ["float16", *["none"] * 4]


def test_a_loss_scale_is_divided_out() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(3.0 * 1024))
    accumulator.add(4, scale=1024.0)
    assert accumulator.take().values[0] == 3.0


def test_samples_that_overflowed_count_as_zeros_and_as_overflowed() -> None:
    own = parameters()
    accumulator = Accumulator(own)
    set_gradients(own, *of(3.0))
    accumulator.add(30)
    accumulator.add_overflowed(10)
    taken = accumulator.take()
    assert taken.samples == 40
    assert taken.values[0] == 3.0 * 0.75
    assert taken.values[-1] == 0.25
    assert [one.name for one in accumulator.layout.segments][-3:] == [USED, LOSS, OVERFLOWED]


# Launched: as on a GPU, which is not waited for. Torch has the same call on the processor.


@pytest.fixture(params=DEVICES)
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    device: str = request.param
    monkeypatch.setattr(accumulator, "GPUS", (device,))
    return device


def on(device: str, dtype: torch.dtype = torch.float32) -> tuple[Parameters, Accumulator]:
    shapes = {"weight": (2, 3), "bias": (3,)}
    own = Parameters(
        (name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        for name, shape in shapes.items()
    )
    return own, Accumulator(own)


def add_to(
    own: Parameters, mean: Accumulator, value: float, samples: int, bad: float | None = None
) -> str | None:
    weight, bias = (
        torch.full_like(one, sign * value) for one, sign in zip(own.tensors, (1, -1), strict=True)
    )
    if bad is not None:
        bias[1] = bad
    set_gradients(own, weight, bias)
    return mean.add(samples, loss=torch.tensor(value, device=weight.device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_launched_batches_have_the_mean_of_those_that_are_waited_for(
    launched: str, dtype: torch.dtype
) -> None:
    own, mean = on(launched, dtype)
    other_own, waited = on("cpu", dtype)
    waited.launches = False
    for value, samples in ((1.5, 10), (-4.0, 21), (7.0, 30)):
        assert add_to(own, mean, value, samples) is None
        assert add_to(other_own, waited, value, samples) is None
    found, wanted = mean.take(), waited.take()
    assert found.samples == wanted.samples == 61
    torch.testing.assert_close(found.values, wanted.values)
    assert wanted.values[9:].tolist() == [1.0, 1.0, wanted.values[11], 1.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_launched_batch_that_is_not_finite_adds_nothing_and_is_named_by_the_next(
    launched: str, bad: float
) -> None:
    own, mean = on(launched)
    assert add_to(own, mean, 9.0, 4, bad) is None  # the first: nothing is left of it either
    assert mean.found_wrong() is None
    assert add_to(own, mean, 1.0, 4) is None
    assert mean.found_wrong() == FoundWrong("bias", 4)
    assert add_to(own, mean, 9.0, 8, bad) is None
    assert add_to(own, mean, 3.0, 4) is None
    assert mean.found_wrong() == FoundWrong("bias", 8)
    assert add_to(own, mean, 9.0, 2, bad) is None
    taken = mean.take()
    assert mean.found_wrong() == FoundWrong("bias", 2)
    assert taken.samples == 8
    assert taken.values.tolist() == [*[2.0] * 6, *[-2.0] * 3, 1.0, 1.0, 2.0, 1.0, 0.0]
    mean.done_with(taken)
    assert add_to(own, mean, 5.0, 4) is None
    assert add_to(own, mean, 5.0, 4) is None
    assert mean.found_wrong() is None
    assert mean.take().values[:6].tolist() == [5.0] * 6


def test_a_launched_loss_that_is_not_finite_is_unknown(launched: str) -> None:
    own, mean = on(launched)
    set_gradients(own, *(torch.ones_like(one) for one in own.tensors))
    assert mean.add(4, loss=torch.tensor(float("nan"), device=launched)) is None
    assert mean.add(4, loss=2.0) is None
    assert mean.take().values[-3:].tolist() == [1.0, 0.5, 0.0]


def test_launched_and_other_batches_mix(launched: str) -> None:
    """One without all gradients is waited for."""
    own, mean = on(launched)
    add_to(own, mean, 2.0, 10)
    set_gradients(own, torch.full_like(own.tensors[0], 6.0), None)
    assert mean.add(10) is None
    taken = mean.take()
    mean.put_back(taken)
    assert add_to(own, mean, 10.0, 20) is None
    values = mean.take().values
    assert values[:9].tolist() == [*[7.0] * 6, *[-5.5] * 3]
    assert values[9:11].tolist() == [1.0, 0.75]


def test_a_gradient_that_lies_otherwise_in_memory_is_added_as_well(launched: str) -> None:
    own, mean = on(launched)
    turned = torch.arange(6.0, device=launched).view(3, 2).t()
    set_gradients(own, turned, torch.zeros_like(own.tensors[1]))
    assert mean.add(4) is None
    assert mean.take().values[:6].tolist() == turned.flatten().tolist()


def test_an_event_is_of_the_gpu_that_was_launched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the first GPU was over at once, and the figures of the second one were read early."""
    recorded: list[str] = []

    class Event:
        def record(self, stream: str = "of the first GPU") -> None:
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "current_stream", "of {}".format)
    record(Event(), torch.device("cuda:1"))  # type: ignore[arg-type]
    assert recorded == ["of cuda:1"]


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    own = Parameters(list(embedding.named_parameters(prefix="embedding")))
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ProtocolMisuse, match=r"embedding\.weight is sparse"):
        Accumulator(own).add(2)


def test_parameters_that_cannot_be_averaged_are_refused_by_name() -> None:
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    single, double = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3).double())
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    with pytest.raises(ProtocolMisuse, match=r"head is torch\.bfloat16"):
        Parameters([("body", single), ("head", half)])
    with pytest.raises(ProtocolMisuse, match=r"head is torch\.float64"):
        Parameters([("body", single), ("head", double)])
    with pytest.raises(ProtocolMisuse, match="no parameter to train"):
        Parameters([("body", frozen)])
    with pytest.raises(ProtocolMisuse, match="are called body"):
        Parameters([("body", single), ("body", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(ProtocolMisuse, match="Codecs are given for tail"):
        Accumulator(Parameters([("body", single)]), {"tail": "float16"})
    assert Parameters([("body", single), ("frozen", frozen)]).names == ("body",)
