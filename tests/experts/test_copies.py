"""Copies of experts: everything comes back, and nothing else is taken in."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from protocols.experts import ExpertBackend, ExpertGrid, Rows, Uid
from protocols.experts.copies import (
    LARGEST_HEADER_BYTES,
    METADATA,
    REFUSED,
    BrokenCopy,
    CopyForm,
    CopyStore,
    KeptCopy,
    WrongCopy,
    restore,
    take_snapshot,
)
from tests.experts.hosts import GRID, WIDTH, are_equal, batch, make, values

UID = GRID.at(5)
Tensors = dict[str, Tensor]


def trained(uid: Uid = UID, steps: int = 3) -> ExpertBackend:
    backend = make(uid)
    for number in range(steps):
        backend.backward(batch(number), batch(number + 1))
    return backend


@pytest.fixture
def form() -> CopyForm:
    return CopyForm(make(GRID.at(0)))


@pytest.fixture
def store(tmp_path: Path) -> CopyStore:
    store = CopyStore(tmp_path, "me")
    assert store.names() == []
    return store


def saved(store: CopyStore, form: CopyForm, backend: ExpertBackend | None = None) -> KeptCopy:
    return store.save(take_snapshot(backend or trained()), form)


# ---- everything comes back


@pytest.mark.slow
def test_a_restored_expert_goes_on_exactly_as_the_saved_one(
    store: CopyStore, form: CopyForm
) -> None:
    backend = trained()
    kept = saved(store, form, backend)
    again = make(UID)
    restore(again, store.path(UID), form)
    assert (kept.steps, again.statistics.steps) == (3, 3)
    for number in range(5):  # the schedule halves the rate on the way
        one = backend.backward(batch(number), batch(number))
        other = again.backward(batch(number), batch(number))
        assert torch.equal(one, other)
        assert are_equal(values(backend), values(again))
    assert backend.optimizer is not None
    assert again.optimizer is not None
    assert again.optimizer.param_groups[0]["lr"] == backend.optimizer.param_groups[0]["lr"] < 0.01


def test_an_expert_that_is_saved_learns_on_in_the_meantime(
    store: CopyStore, form: CopyForm
) -> None:
    backend = trained()
    before, snapshot = values(backend), take_snapshot(backend)
    backend.backward(batch(), batch())
    store.save(snapshot, form)
    again = make(UID)
    restore(again, store.path(UID), form)
    assert are_equal(values(again), before)


class Counting(torch.optim.SGD):
    """An optimizer that counts with a plain number."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    own = self.state[parameter]
                    own["count"] = own.get("count", 0) + 1


class Twofold(nn.Module):
    """Half of the parameters are never used, and get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += 1
        return rows * self.used


def counting(uid: Uid) -> ExpertBackend:
    network = Twofold()
    optimizer = Counting(network.parameters(), lr=0.1, momentum=0.9)
    return ExpertBackend(uid, network, Rows((WIDTH,)), optimizer)


def test_plain_numbers_buffers_and_unused_parameters_come_back(store: CopyStore) -> None:
    form, backend = CopyForm(counting(UID)), counting(UID)
    backend.backward(batch(), batch())
    backend.forward(batch())
    saved(store, form, backend)
    again = counting(UID)
    restore(again, store.path(UID), form)
    assert isinstance(again.network, Twofold)
    assert again.network.seen == 2
    assert again.optimizer is not None
    statistics = again.optimizer.state[again.network.used]
    assert statistics["count"] == 1
    assert isinstance(statistics["count"], int)
    assert again.network.unused not in again.optimizer.state


def test_statistics_keep_a_dtype_other_than_that_of_their_parameter(store: CopyStore) -> None:
    class Master(Counting):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            super().step(closure)
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("master", torch.full((WIDTH,), 1 / 3))

    def of_bfloat16(uid: Uid) -> ExpertBackend:
        network = nn.Linear(WIDTH, WIDTH, bias=False).to(torch.bfloat16)
        return ExpertBackend(
            uid, network, Rows((WIDTH,), "bfloat16"), Master(network.parameters(), lr=0.1)
        )

    form, backend = CopyForm(of_bfloat16(UID)), of_bfloat16(UID)
    rows = batch().to(torch.bfloat16)
    backend.backward(rows, rows)
    saved(store, form, backend)
    again = of_bfloat16(UID)
    restore(again, store.path(UID), form)
    assert again.optimizer is not None
    (statistics,) = again.optimizer.state.values()
    assert statistics["master"].dtype == torch.float32
    assert bool((statistics["master"] == 1 / 3).all())


# ---- the files of a server


def test_copies_are_found_again_after_a_restart(store: CopyStore, form: CopyForm) -> None:
    kept = saved(store, form)
    (store.path(UID).parent / "ffn.0.1.0011.part").write_bytes(b"a write that was cut off")
    again = CopyStore(store.path(UID).parent, "me")
    assert again.names() == [UID]
    again.load(UID, form)
    assert again.kept() == (kept,)
    assert [path.name for path in store.path(UID).parent.iterdir()] == [store.path(UID).name]


def test_a_copy_that_was_replaced_cannot_be_opened_under_its_old_digest(
    store: CopyStore, form: CopyForm
) -> None:
    backend = trained()
    old = saved(store, form, backend)
    with store.open(old) as file:
        backend.backward(batch(), batch())
        new = saved(store, form, backend)
        assert blake3(file.read()).digest() == old.digest, "whoever reads it goes on"
    with pytest.raises(FileNotFoundError):
        store.open(old)
    with store.open(new) as file:
        assert blake3(file.read()).digest() == new.digest


def test_a_failed_save_leaves_the_earlier_copy_alone(store: CopyStore, form: CopyForm) -> None:
    kept = saved(store, form)
    content = store.path(UID).read_bytes()
    diverged = trained()
    with torch.no_grad():
        next(diverged.network.parameters()).fill_(math.inf)
    with pytest.raises(BrokenCopy, match=r"network/hidden\.0\.weight .* not finite"):
        saved(store, form, diverged)
    assert store.path(UID).read_bytes() == content
    assert store.find(UID) == kept
    assert len(list(store.path(UID).parent.iterdir())) == 1


def test_own_copies_are_put_aside_as_many_as_there_may_be(tmp_path: Path, form: CopyForm) -> None:
    store = CopyStore(tmp_path, "me", most_aside=2)
    store.names()
    kept = [saved(store, form, trained(GRID.at(number))) for number in range(3)]
    for copy in kept:
        store.put_own_aside(copy.uid)
    others = CopyStore(tmp_path, "another")
    for uid in others.names():
        others.load(uid, form)
        others.put_own_aside(uid)
    names = sorted(path.name for path in tmp_path.glob("*.aside"))
    assert names == [f"{copy.uid}.aside" for copy in kept[1:]]
    assert form.check(tmp_path / names[0], kept[1].uid).steps == 3


def test_a_copy_with_more_steps_than_the_one_that_replaces_it_stays_beside_it(
    store: CopyStore, form: CopyForm
) -> None:
    """A server that begins an expert anew by mistake sends its first steps to all keepers."""
    saved(store, form)
    backend = make(UID)
    backend.backward(batch(), batch())
    assert saved(store, form, backend).steps == 1
    assert form.check(store.path(UID).with_suffix(".aside"), UID).steps == 3


def test_a_checkpoint_of_another_shape_is_put_aside_and_named(
    store: CopyStore, form: CopyForm, caplog: pytest.LogCaptureFixture
) -> None:
    change(store, form, lambda tensors: tensors.update({"network/hidden.0.bias": torch.ones(3)}))
    again = CopyStore(store.path(UID).parent, "me")
    again.load(UID, form)
    assert again.kept() == ()
    assert "network/hidden.0.bias is (3,) F32 in the copy, and (16,) F32 here" in caplog.text
    assert store.path(UID).with_suffix(REFUSED).exists()
    assert again.names() == []


# ---- hostile copies


def change(
    store: CopyStore,
    form: CopyForm,
    alter: Callable[[Tensors], object] = lambda _: None,
    content: Callable[[dict[str, object]], object] = lambda _: None,
) -> Path:
    """A saved copy with other tensors, or another content."""
    saved(store, form)
    path = store.path(UID)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        said = json.loads(file.metadata()[METADATA])
    alter(tensors)
    content(said)
    save_file(tensors, path, {METADATA: json.dumps(said)})
    return path


def test_an_unchanged_copy_is_accepted(store: CopyStore, form: CopyForm) -> None:
    label = form.check(change(store, form), UID)
    assert (label.steps, label.server) == (3, "me")


BIAS, MEAN = "network/output.bias", "optimizer/0/exp_avg"
ALTERATIONS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop(BIAS), "network/output.bias is in the expert, and not in the copy"),
    (lambda t: t.update(more=torch.ones(1)), "more is in the copy, and not in the expert"),
    (lambda t: t.update({BIAS: torch.ones(WIDTH, 1)}), r"network/output.bias is \(8, 1\)"),
    (lambda t: t.update({BIAS: t[BIAS].to(torch.float16)}), r"output.bias is \(8,\) F16"),
    (lambda t: t.update({MEAN: torch.ones(2)}), r"optimizer/0/exp_avg is \(2,\)"),
]


@pytest.mark.parametrize(("alter", "told"), ALTERATIONS)
def test_other_tensors_are_refused_by_name(
    store: CopyStore, form: CopyForm, alter: Callable[[Tensors], object], told: str
) -> None:
    with pytest.raises(WrongCopy, match=told):
        form.check(change(store, form, alter), UID)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [BIAS, MEAN])
def test_values_that_are_not_finite_are_refused(
    store: CopyStore, form: CopyForm, name: str, value: float
) -> None:
    path = change(store, form, lambda tensors: tensors[name].view(-1)[-1:].fill_(value))
    with pytest.raises(BrokenCopy, match=f"{name} has values that are not finite"):
        form.check(path, UID)


def test_values_with_which_an_expert_cannot_learn_are_refused(
    store: CopyStore, form: CopyForm
) -> None:
    name = "optimizer/0/exp_avg_sq"
    path = change(store, form, lambda tensors: tensors[name].fill_(-1.0))
    assert form.check(path, UID).steps == 3, "it looks like any other"
    with pytest.raises(WrongCopy, match="cannot learn with this copy"):
        restore(make(UID), path, form)


@pytest.mark.parametrize("epoch", [-1, 5.0])
def test_numbers_that_the_schedule_does_not_take_are_refused(
    store: CopyStore, form: CopyForm, epoch: float
) -> None:
    """They ended every node that took the copy, at each start anew."""
    snapshot = take_snapshot(trained())
    numbers = {**snapshot.numbers, "schedule/last_epoch": epoch}
    store.save(replace(snapshot, numbers=numbers), form)
    with pytest.raises(WrongCopy, match="cannot learn with this copy"):
        restore(make(UID), store.path(UID), form)


def test_a_file_that_cannot_be_read_says_nothing_about_the_copy(
    store: CopyStore, form: CopyForm
) -> None:
    saved(store, form)
    with pytest.raises(FileNotFoundError):
        restore(make(UID), store.path(UID).with_suffix(".gone"), form)


def test_weights_that_make_no_finite_outputs_are_refused(store: CopyStore, form: CopyForm) -> None:
    path = change(store, form, lambda tensors: tensors["network/output.weight"].fill_(3e38))
    with pytest.raises(WrongCopy, match="cannot learn with this copy"):
        restore(make(UID), path, form)


CONTENTS: list[tuple[Callable[[dict[str, object]], object], type[Exception], str]] = [
    (lambda c: c.update(uid="ffn.0.0"), BrokenCopy, r"a copy of ffn\.0\.0, not of ffn\.1\.1"),
    (lambda c: c.update(steps=0), BrokenCopy, "no copy of an expert"),
    (lambda c: c.update(steps=1 << 60), BrokenCopy, "no copy of an expert"),
    (lambda c: c.update(server="x" * 200), BrokenCopy, "no copy of an expert"),
    (lambda c: c.update(steps="3"), BrokenCopy, "no copy of an expert"),
    (lambda c: c.pop("numbers"), BrokenCopy, "no copy of an expert"),
    (lambda c: c.update(more=1), BrokenCopy, "no copy of an expert"),
    (lambda c: numbers(c).pop("groups/0/lr"), WrongCopy, "groups/0/lr is not on both sides"),
    (lambda c: numbers(c).update(more=1), WrongCopy, "more is not on both sides"),
    (lambda c: numbers(c).update({"groups/0/lr": 1e300}), BrokenCopy, "groups/0/lr is 1e"),
    (lambda c: numbers(c).update({"groups/0/lr": math.nan}), BrokenCopy, "no copy of an expert"),
    (lambda c: numbers(c).update({"groups/0/lr": 10**400}), BrokenCopy, "no copy of an expert|is"),
]


def numbers(content: dict[str, object]) -> dict[str, object]:
    found = content["numbers"]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(("alter", "error", "told"), CONTENTS)
def test_a_wrong_content_is_refused(
    store: CopyStore,
    form: CopyForm,
    alter: Callable[[dict[str, object]], object],
    error: type[Exception],
    told: str,
) -> None:
    path = change(store, form, content=alter)
    with pytest.raises(error, match=told):
        form.check(path, UID)


def test_bytes_of_any_kind_are_refused_and_nothing_else_is_raised(
    store: CopyStore, form: CopyForm
) -> None:
    path = change(store, form)
    whole = path.read_bytes()
    chance = torch.Generator().manual_seed(1)
    broken = [whole[:length] for length in (0, 1, 7, 8, 9, 100, len(whole) // 2, len(whole) - 1)]
    broken += [whole + b"\0", b"\xff" * 8 + whole[8:], bytes(8) + whole[8:], bytes(len(whole))]
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in torch.randint(0, header, (200,), generator=chance).tolist():
        broken.append(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
    for content in broken:
        path.write_bytes(content)
        with pytest.raises((BrokenCopy, WrongCopy)):
            form.check(path, UID)


def test_a_huge_header_is_refused_before_it_is_read(store: CopyStore, form: CopyForm) -> None:
    path = store.path(UID)
    length = LARGEST_HEADER_BYTES + 1
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(8 + length)
    with pytest.raises(BrokenCopy, match="with a header of 1,048,577"):
        form.check(path, UID)


def test_a_file_that_is_larger_than_any_copy_is_refused(store: CopyStore, form: CopyForm) -> None:
    path = change(store, form)
    with open(path, "ab") as file:
        file.truncate(form.largest_bytes + 1)
    with pytest.raises(BrokenCopy, match="It has"):
        form.check(path, UID)


def test_an_expert_of_another_grid_has_another_form(store: CopyStore, form: CopyForm) -> None:
    other = Uid(ExpertGrid("attention", (4,)).name, (1,))
    with pytest.raises(BrokenCopy, match="not of attention"):
        form.check(change(store, form), other)
