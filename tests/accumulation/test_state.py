"""Capturing and restoring: equal states have equal digests, nothing is lost, everything checked."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from protocols.accumulation.optimizer_state import _memory_of
from protocols.accumulation.signature import Signature, TensorSpec, differences, torch_release
from protocols.accumulation.state_manifest import (
    MOST_DEPTH,
    MOST_TENSORS,
    StateRefused,
    check,
    encode,
    join,
    name_of,
    pack,
    read_manifest,
    separate,
    unpack,
)
from protocols.accumulation.training_state import TrainingState, capture, look, restore
from protocols.errors import LimitExceeded, MalformedMessage

Optimizers = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: list[Optimizers] = [
    lambda named: torch.optim.AdamW(named, lr=0.01, amsgrad=True),
    lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9, nesterov=True),
    lambda named: torch.optim.Adagrad(named, lr=0.01),
    lambda named: torch.optim.RMSprop(named, lr=0.01, centered=True, momentum=0.5),
    lambda named: torch.optim.LBFGS([one for _, one in named], max_iter=2),
    lambda named: torch.optim.NAdam(named, lr=torch.tensor(0.01)),
]


class Training:
    """A small network in training. A seed decides all of it."""

    def __init__(self, optimizer: Optimizers = OPTIMIZERS[0], *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = optimizer(list(self.model.named_parameters()))
        schedule = torch.optim.lr_scheduler
        self.scheduler: Any = None
        if not isinstance(self.optimizer, torch.optim.LBFGS | torch.optim.NAdam):
            self.scheduler = schedule.SequentialLR(
                self.optimizer,
                [
                    schedule.LinearLR(self.optimizer, total_iters=2),
                    schedule.MultiStepLR(self.optimizer, [1, 1, 4]),
                ],
                [2],
            )

    def train(self, steps: int, *, seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(steps):
            batch = torch.randn(6, 4)

            def closure(batch: Tensor = batch) -> Tensor:
                self.optimizer.zero_grad()
                loss: Tensor = self.model(batch).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            self.optimizer.step(closure)
            if self.scheduler is not None:
                self.scheduler.step()

    def parts(self) -> tuple[Any, Any, Any, Any]:
        return (
            self.model.named_parameters(),
            self.model.named_buffers(),
            self.optimizer,
            self.scheduler,
        )

    def capture(self, extra: dict[str, Any] | None = None) -> TrainingState:
        return capture(*self.parts(), extra, run="test", epoch=3, history=b"h" * 16)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_peer_that_takes_a_state_goes_on_as_its_donor_does(optimizer: Optimizers) -> None:
    donor, newcomer = Training(optimizer), Training(optimizer, seed=1)
    donor.train(3, seed=2)
    state = donor.capture()
    restore(state, *newcomer.parts())
    assert newcomer.capture().digest == state.digest
    donor.train(3, seed=4)
    newcomer.train(3, seed=4)
    assert newcomer.capture().digest == donor.capture().digest != state.digest


def test_a_peer_that_takes_a_state_holds_it_once() -> None:
    """Beside the state itself, which is three times the model with AdamW."""
    donor, other = Training(), Training(seed=1)
    donor.train(1, seed=2)
    other.train(2, seed=3)
    parameter = next(other.model.parameters())
    statistics = dict(other.optimizer.state[parameter])
    places = {key: one.data_ptr() for key, one in statistics.items()}
    assert len(places) == 4
    state = donor.capture({"momentum": torch.arange(3.0)})
    taken = restore(state, *other.parts())
    now = other.optimizer.state[parameter]
    assert {key: one.data_ptr() for key, one in now.items()} == places
    assert torch.equal(now["exp_avg"], state.tensor("optimizer/statistics/0.weight/exp_avg"))
    assert _memory_of(taken["momentum"]) == _memory_of(state.memory)


def test_statistics_that_share_memory_are_taken_over_apart() -> None:
    donor, other = Training(), Training(seed=1)
    donor.train(1, seed=2)
    other.train(1, seed=3)
    for kept in other.optimizer.state.values():
        kept["max_exp_avg_sq"] = kept["exp_avg_sq"] = (
            kept["exp_avg_sq"].view(-1).view_as(kept["exp_avg_sq"])
        )
    donor.train(2, seed=4)
    state = donor.capture()
    restore(state, *other.parts())
    assert other.capture().digest == state.digest


def test_the_kinds_of_containers_come_back() -> None:
    donor, newcomer = Training(), Training(seed=1)
    donor.train(1, seed=2)
    extra = {"pair": (1, 2.5), "nested": {"one": [None, True, "text", b"bytes"], 7: "seven"}}
    taken = restore(donor.capture({**extra, "tensor": torch.arange(3)}), *newcomer.parts())
    assert {key: value for key, value in taken.items() if key != "tensor"} == extra
    assert torch.equal(taken["tensor"], torch.arange(3))
    milestones = newcomer.scheduler._schedulers[1].milestones
    assert isinstance(milestones, Counter)
    assert newcomer.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ],
)
def test_every_kind_of_value_travels_exactly(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3,), (2, 3), (1, 0, 2)]:
        tensor = (torch.rand(shape) * 2).to(dtype)
        state = capture([("w", tensor.clone())], extra={"t": tensor}, run="r", epoch=0)
        assert torch.equal(state.tensor("model/w"), tensor)
        assert torch.equal(state.extra["t"], tensor)


def test_tensors_that_are_not_contiguous_travel_with_the_same_values() -> None:
    tensor = torch.arange(12.0).view(3, 4).t()
    live = look([("w", tensor)], run="r", epoch=0)
    assert torch.equal(live.copy().tensor("model/w"), tensor)
    assert live.manifest() == live.copy().manifest


def test_the_digest_is_the_same_without_a_copy_and_names_every_byte() -> None:
    training = Training()
    training.train(2, seed=0)
    live = look(*training.parts(), run="test", epoch=3, history=b"h" * 16, piece_bytes=1024)
    state = live.copy()
    assert live.manifest() == state.manifest
    assert state.manifest.piece_count > 1
    digests = {state.digest}
    for number in range(0, len(state.memory), 97):
        changed = live.copy()
        changed.memory[number] ^= 1
        digests.add(changed.digest)
    other_epoch = look(*training.parts(), run="test", epoch=4, history=b"h" * 16, piece_bytes=1024)
    digests.add(other_epoch.copy().digest)
    assert len(digests) == 2 + len(range(0, len(state.memory), 97))


def test_the_order_in_which_things_were_filled_in_does_not_matter() -> None:
    extra = {"a": 1, "b": 2}
    turned = {"b": 2, "a": 1}
    one = capture([("x", torch.ones(2)), ("y", torch.ones(3))], extra=extra, run="r", epoch=0)
    two = capture([("y", torch.ones(3)), ("x", torch.ones(2))], extra=turned, run="r", epoch=0)
    assert one.digest == two.digest


def test_how_a_device_computes_is_no_part_of_the_state() -> None:
    def optimizer(**switches: bool) -> Optimizers:
        return lambda named: torch.optim.AdamW(named, lr=0.01, **switches)

    loop, fused = Training(optimizer(foreach=False)), Training(optimizer(foreach=True), seed=1)
    loop.train(1, seed=2)
    restore(loop.capture(), *fused.parts())
    assert fused.optimizer.param_groups[0]["foreach"] is True
    assert fused.capture().digest == loop.capture().digest


def test_statistics_keep_their_dtype_beside_weights_of_another() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([("w", weight)], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((4,), 1 / 3)
    state = capture([("w", weight)], (), optimizer, run="r", epoch=0)
    other = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    theirs = torch.optim.SGD([("w", other)], lr=0.1, momentum=0.9)
    restore(state, [("w", other)], (), theirs)
    buffer = theirs.state[other]["momentum_buffer"]
    assert buffer.dtype == torch.float32
    assert torch.equal(buffer, torch.full((4,), 1 / 3))
    buffer.add_(1)  # what was restored is a copy
    assert capture([("w", weight)], (), optimizer, run="r", epoch=0).digest == state.digest


class Odd:
    pass


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"odd": Odd()}, r"extra/odd is a .*Odd, which cannot travel"),
        ({"set": {1, 2}}, "extra/set is a builtins.set"),
        ({"deep": [[["x"]]], "f": print}, "extra/f is a builtins.builtin_function"),
        ({1.5: "key"}, "has a key that is neither text nor a number"),
        ({True: "key"}, "has a key that is neither text nor a number"),
        ({"large": 1 << 70}, "extra/large is an integer of more than 64 bits"),
        ({"complex": torch.zeros(1, dtype=torch.complex64)}, "extra/complex is a tensor that"),
        ({"sparse": torch.eye(2).to_sparse()}, "extra/sparse is a tensor that cannot travel"),
        ({"meta": torch.empty(2, device="meta")}, r"cannot travel \(meta\)"),
        ({"long": "x" * (1 << 20)}, r"takes 1,048,\d+ bytes"),
    ],
)
def test_a_value_that_cannot_travel_is_refused_by_its_path(
    extra: dict[str, Any], told: str
) -> None:
    with pytest.raises(StateRefused, match=told):
        look([("w", torch.zeros(1))], extra=extra, run="r", epoch=0)


def test_nesting_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(StateRefused, match=f"nested more than {MOST_DEPTH} deep"):
        look([("w", torch.zeros(1))], extra={"e": endless}, run="r", epoch=0)


def test_another_model_is_refused_in_words_and_nothing_is_touched() -> None:
    donor = Training()
    donor.train(1, seed=0)
    state = donor.capture()
    other = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.Linear(9, 2), nn.Linear(2, 2))
    other[2].double()
    before = [one.clone() for one in other.parameters()]
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(StateRefused) as refused:
        restore(state, other.named_parameters(), other.named_buffers(), optimizer)
    for words in ("the optimizer is SGD here and AdamW there", "9×4 here and 8×4 there", "more"):
        assert words in refused.value.what
    assert all(map(torch.equal, before, other.parameters()))


@pytest.mark.parametrize("change", ["groups", "optimizer", "scheduler"])
def test_an_optimizer_of_another_kind_is_refused_before_anything_is_touched(change: str) -> None:
    donor, newcomer = Training(), Training(seed=1)
    donor.train(1, seed=0)
    state = donor.capture()
    optimizer, scheduler = newcomer.optimizer, newcomer.scheduler
    if change == "groups":
        named = list(newcomer.model.parameters())
        optimizer = torch.optim.AdamW([{"params": named[:1]}, {"params": named[1:]}], amsgrad=True)
    elif change == "optimizer":
        state = capture(*donor.parts()[:2], run="test", epoch=3)
    else:
        state = capture(*donor.parts()[:3], run="test", epoch=3)
    before = newcomer.model[0].weight.clone()
    with pytest.raises(StateRefused):
        restore(
            state,
            newcomer.model.named_parameters(),
            newcomer.model.named_buffers(),
            optimizer,
            scheduler,
        )
    assert torch.equal(newcomer.model[0].weight, before)


def with_metadata(state: TrainingState, place: tuple[Any, ...], value: Any) -> TrainingState:
    """The same state with another value in one place of its metadata, and a digest of its own."""
    tree = inside = state.tree()
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    metadata = pack(separate(tree, "", {}))
    header = msgspec.structs.replace(state.manifest, metadata=metadata, pieces=b"")
    return TrainingState(header, state.memory)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("optimizer", "groups"), 7),
        (("optimizer", "groups", 0), 7),
        (("optimizer", "groups", 0, "lr"), "fast"),
        (("optimizer", "groups", 0, "betas"), (0.9, "b")),
        (("optimizer", "groups", 0, "betas"), (0.9,)),
        (("optimizer", "groups", 0, "lr"), None),
        (("optimizer", "statistics"), []),
        (("optimizer", "statistics", "0.weight"), 3),
        (("optimizer", "statistics", "0.weight", "exp_avg"), 3.0),
        (("optimizer", "statistics", "0.weight", "exp_avg"), "text"),
        (("optimizer", "statistics", "0.weight", "step"), None),
        (("optimizer", "rest"), None),
        (("scheduler",), 3),
        (("scheduler", "optimizer"), None),
        (("scheduler", "last_epoch"), "x"),
        (("scheduler", "last_epoch"), None),
        (("scheduler", "_last_lr"), []),
        (("scheduler", "_last_lr"), None),
        (("scheduler", "base_lrs"), [0.1, 0.2]),
        (("extra",), None),
    ],
)
def test_invented_metadata_is_refused_before_anything_is_touched(
    place: tuple[Any, ...], value: Any
) -> None:
    """Any peer could send such a state, under a digest of its own."""
    donor, newcomer = Training(), Training(seed=1)
    donor.train(1, seed=0)
    made_up = with_metadata(donor.capture(), place, value)
    before = newcomer.capture().digest
    with pytest.raises((StateRefused, MalformedMessage)):
        restore(made_up, *newcomer.parts())
    assert newcomer.capture().digest == before


def test_releases_of_torch_are_told_apart_by_their_first_two_numbers() -> None:
    assert torch_release("2.13.0+cu130") == torch_release("2.13.1") == "2.13"
    assert torch_release("2.4.1") != torch_release("2.13.0")


def test_signatures_differ_in_words() -> None:
    mine = Signature("AdamW", (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "int64", ())))
    same = Signature("AdamW", (TensorSpec("b", "int64", ()), TensorSpec("a", "float32", (2, 3))))
    assert mine.digest == same.digest
    assert differences(mine, same) == []
    other = Signature("AdamW", (TensorSpec("a", "float32", ()), TensorSpec("c", "bool", ())))
    assert differences(mine, other) == [
        "a is 2×3 here and one value there",
        "b is only here",
        "c is only there",
    ]


# Manifests and metadata from strangers

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.lists(inside, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inside, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@given(TREES)
def test_a_tree_comes_back_as_it_was(tree: Any) -> None:
    tensors: dict[str, Tensor] = {}
    packed = pack(separate(tree, "", tensors))
    assert join(unpack(packed), tensors) == tree
    assert pack(separate(join(unpack(packed), tensors), "", {})) == packed


@given(st.binary(max_size=60))
def test_no_bytes_make_reading_metadata_fail_otherwise(junk: bytes) -> None:
    with contextlib.suppress(MalformedMessage, LimitExceeded):
        join(unpack(junk), {})


@given(st.binary(max_size=60), st.integers(0, 300))
def test_no_bytes_make_reading_a_manifest_fail_otherwise(junk: bytes, place: int) -> None:
    body = bytearray(_body())
    place %= len(body)
    body[place : place + len(junk)] = junk
    with contextlib.suppress(MalformedMessage, LimitExceeded):
        read_manifest(bytes(body))


def _body() -> bytes:
    return capture([("w", torch.zeros(3))], extra={"x": 1}, run="r", epoch=1).body


def manifest_with(tensors: tuple[TensorSpec, ...], pieces: int | None = None) -> bytes:
    manifest = capture([("w", torch.zeros(3))], run="r", epoch=1).manifest
    signature = Signature("", tuple(one for one in tensors if one.name.startswith("model/")))
    changed = msgspec.structs.replace(manifest, tensors=tensors, signature=signature.digest)
    count = -(-changed.stream_bytes // changed.piece_bytes) if pieces is None else pieces
    return encode(msgspec.structs.replace(changed, pieces=bytes(32 * count)))


W = TensorSpec("model/w", "float32", (3,))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (manifest_with((W,), pieces=2), "64 bytes of digests for 1 pieces"),
        (manifest_with((W, W)), "not in ascending order"),
        (manifest_with((TensorSpec("z", "bool", ()), W)), "not in ascending order"),
        (b"\x00" * (5 << 20), "A manifest of 5,242,880 bytes"),
        (b"", "not a Manifest"),
    ],
)
def test_an_impossible_manifest_is_malformed(body: bytes, told: str) -> None:
    with pytest.raises((MalformedMessage, LimitExceeded), match=told):
        read_manifest(body)


def test_too_many_tensors_are_malformed() -> None:
    many = tuple(TensorSpec(f"extra/{n:06}", "bool", ()) for n in range(MOST_TENSORS + 1))
    with pytest.raises(MalformedMessage):
        read_manifest(manifest_with(many, pieces=1))


def test_statistics_beyond_what_a_model_can_need_are_refused() -> None:
    mine = Signature("", (TensorSpec("model/w", "float32", (1 << 20,)),))
    five = [TensorSpec(f"optimizer/{n}", "float32", (1 << 20,)) for n in range(5)]
    check(read_manifest(manifest_with((*mine.tensors, *five))), mine, "r")
    many = [TensorSpec(f"optimizer/{n:02}", "float32", (1 << 20,)) for n in range(10)]
    with pytest.raises(StateRefused, match="Its statistics take 41,943,040 bytes"):
        check(read_manifest(manifest_with((*mine.tensors, *many))), mine, "r")
    with pytest.raises(StateRefused, match="a state of the run 'r', not of 'other'"):
        check(read_manifest(manifest_with(mine.tensors)), mine, "other")


def test_a_state_goes_by_the_digest_of_its_manifest() -> None:
    state = capture([("w", torch.zeros(3))], run="r", epoch=1)
    assert name_of(state.body) == state.digest
    assert len(state.digest) == 32
