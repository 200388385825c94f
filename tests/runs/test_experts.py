"""The experts of a run follow from its definition, the same ones at every server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from node.run.checking import check
from node.run.costs import costs_of
from node.run.definition import (
    ExpertsSection,
    WrongDefinition,
    incompatible_parts,
    read_definition,
)
from node.run.experts import (
    call_bytes,
    directory_name,
    grids,
    maker,
    most_experts,
    saved_bytes,
    section_of,
    server_bytes,
)
from node.run.template import new_definition
from protocols.accumulation.training_description import LONGEST_SETTING
from protocols.errors import ProtocolMisuse
from protocols.experts import ExpertGrid, Uid
from protocols.experts.copies import CopyForm, CopyStore, restore, take_snapshot
from tests.runs.definitions import TEXT as WITHOUT
from tests.runs.expert_definitions import TEXT, changed

DEFINITION = read_definition(TEXT)
LOWER_RATE = '[experts.optimizer]\nname = "adamw"\nlr = 0.001\nbetas = [0.8, 0.9]'
UID = Uid("ffn0", (1, 2))


def test_every_mixture_has_a_grid_of_its_own() -> None:
    assert grids(DEFINITION) == (ExpertGrid("ffn0", (2, 3)), ExpertGrid("ffn1", (2, 3)))


def test_a_run_without_experts_has_no_grid() -> None:
    definition = read_definition(WITHOUT)
    assert definition.experts is None
    assert grids(definition) == ()
    with pytest.raises(ProtocolMisuse):
        section_of(definition)


def test_an_expert_is_the_same_wherever_it_is_made() -> None:
    one, two = maker(DEFINITION)(UID), maker(DEFINITION)(UID)
    for name, parameter in one.network.named_parameters():
        assert torch.equal(parameter, two.network.get_parameter(name))


def test_experts_differ_by_their_uid_and_by_the_seed_of_the_run() -> None:
    reseeded = read_definition(changed("[training]\n", "[training]\nseed = 1\n"))
    made = [maker(DEFINITION)(UID), maker(DEFINITION)(Uid("ffn1", (1, 2))), maker(reseeded)(UID)]
    first = [next(one.network.parameters()) for one in made]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_an_expert_learns_as_the_definition_says() -> None:
    backend = maker(DEFINITION)(UID)
    assert backend.rows.shape == (16,)
    assert backend.max_norm == 1.0
    assert backend.optimizer is not None
    assert backend.optimizer.param_groups[0]["lr"] == pytest.approx(0.004 / 3)  # in warm-up
    before = [one.detach().clone() for one in backend.network.parameters()]
    backend.backward(torch.ones(3, 16), torch.ones(3, 16))
    assert backend.optimizer.param_groups[0]["lr"] == pytest.approx(0.004 * 2 / 3)
    assert any(
        not torch.equal(one, old)
        for one, old in zip(backend.network.parameters(), before, strict=True)
    )


def test_what_an_expert_takes_is_counted_from_its_tensors() -> None:
    network = maker(DEFINITION)(UID).network
    parameters = sum(one.numel() for one in network.parameters())
    assert saved_bytes(DEFINITION) == 4 * 3 * parameters
    assert 4 * 4 * parameters < server_bytes(DEFINITION) < 2 * 4 * 4 * parameters


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("sizes = [2, 3]", "sizes = [2, 4]", ["sizes below [experts]"]),
        ("k = 2", "k = 3", ["k below [experts]"]),
        ("inner = [32]", "inner = [9]", ["network below [experts]"]),
        ('codec = "none"', 'codec = "float16"', []),
        ("[training]\n", "[training]\nseed = 7\n", ["seed below [training]"]),
    ],
)
def test_other_experts_are_another_way_of_training(old: str, new: str, told: list[str]) -> None:
    assert incompatible_parts(DEFINITION, read_definition(changed(old, new))) == told


@pytest.mark.parametrize(
    ("old", "new", "other_experts", "trains_apart"),
    [
        ("sizes = [2, 3]", "sizes = [2, 4]", True, True),
        ('["ffn0", "ffn1"]', '["ffn0", "ffn2"]', True, True),
        ("inner = [32]", "inner = [9]", True, True),
        ("k = 2", "k = 3", False, True),
        ('[experts.optimizer]\nname = "adamw"', '[experts.optimizer]\nname = "lamb"', True, True),
        ('[experts.schedule]\nname = "constant"\nwarmup = 2\n', "", True, True),
        ('[experts.optimizer]\nname = "adamw"\nlr = 0.004', LOWER_RATE, False, False),
        ("warmup = 2", "warmup = 3", False, False),
        ("[training]\n", "[training]\nseed = 1\n", True, False),
        ('codec = "none"', 'codec = "float16"', False, False),
    ],
    ids=[
        "sizes",
        "grids",
        "network",
        "k",
        "optimizer",
        "no schedule",
        "rate",
        "warmup",
        "seed",
        "codec",
    ],
)
def test_members_with_other_experts_under_one_name_do_not_mix(
    old: str, new: str, other_experts: bool, trains_apart: bool
) -> None:
    other = read_definition(changed(old, new))
    assert (directory_name(other) != directory_name(DEFINITION)) == other_experts
    mine, theirs = (one.optimizer_options()["further"] for one in (DEFINITION, other))
    assert (mine != theirs) == trains_apart


@pytest.mark.parametrize("schedule", [True, False])
def test_a_copy_goes_on_with_the_settings_of_a_later_definition(
    tmp_path: Path, schedule: bool
) -> None:
    last = '[experts.schedule]\nname = "constant"\nwarmup = 2\n'
    text = TEXT if schedule else changed(last, "")
    before, later = (
        maker(read_definition(one))
        for one in (
            text,
            text.replace(b'[experts.optimizer]\nname = "adamw"\nlr = 0.004', LOWER_RATE.encode()),
        )
    )
    backend, store = before(UID), CopyStore(tmp_path, "me")
    for _ in range(3):
        backend.backward(torch.ones(3, 16), torch.ones(3, 16))
    store.save(take_snapshot(backend), CopyForm(before(UID)))
    again, form = later(UID), CopyForm(later(UID))
    form.check(store.path(UID), UID)
    restore(again, store.path(UID), form)
    assert again.statistics.steps == 3
    assert again.optimizer is not None
    for group in again.optimizer.param_groups:
        assert (group["lr"], group["betas"]) == (0.001, (0.8, 0.9))


def test_a_long_difference_between_networks_is_not_cut_off() -> None:
    deep = read_definition(changed("inner = [32]", f"inner = {[8] * 60}"))
    deeper = read_definition(changed("inner = [32]", f"inner = {[8] * 61}"))
    words = {
        one.optimizer_options()["further"]["network below [experts]"] for one in (deep, deeper)
    }
    assert len(words) == 2
    assert max(map(len, words)) < LONGEST_SETTING


def test_a_run_that_gets_experts_is_another_one() -> None:
    without = read_definition(TEXT.partition(b"[experts]")[0])
    assert incompatible_parts(without, DEFINITION) == ["[experts]"]
    assert without.first_parameters != DEFINITION.first_parameters


def test_every_key_is_explained_in_a_new_file_with_its_default() -> None:
    text = new_definition("poem").decode()
    part = text.partition("#[experts]\n")[2].partition("\n\n")[0]
    lines = [one[1:] for one in part.splitlines() if one.startswith("#") and one[1] != " "]
    written = msgspec.toml.decode("\n".join(["[experts]", *lines]))["experts"]
    assert msgspec.convert(written, ExpertsSection)
    for field in msgspec.structs.fields(ExpertsSection):
        assert field.name in written
        if not field.required and field.default is not None:
            assert written[field.name] == field.default


WRONG = {
    "two grids of one name": (
        'grids = ["ffn0", "ffn1"]',
        'grids = ["ffn0", "ffn0"]',
        "grids below [experts] has two grids called ffn0: each mixture has its own.",
    ),
    "no grid": ('grids = ["ffn0", "ffn1"]', "grids = []", "grids below [experts] cannot be []"),
    "a name that is a path": ('"ffn0"', '"../ffn0"', "grids below [experts] cannot be ['../ffn0'"),
    "a name that is a prefix": ('"ffn0"', '"ffn.0"', "grids below [experts] cannot be"),
    "too many grids": (
        'grids = ["ffn0", "ffn1"]',
        f"grids = {[f'ffn{n}' for n in range(65)]}",
        "grids below [experts] cannot be",
    ),
    "no dimension": ("[2, 3]", "[]", "sizes below [experts] cannot be []"),
    "too many dimensions": ("[2, 3]", "[2, 2, 2, 2, 2]", "sizes below [experts] cannot be [2, 2,"),
    "an empty dimension": ("[2, 3]", "[2, 0]", "sizes below [experts] cannot be [2, 0]"),
    "a dimension that is too large": ("[2, 3]", "[2, 4097]", "sizes below [experts] cannot be"),
    "more experts than there are": ("k = 2", "k = 7", "the grid has room for 6 experts only"),
    "a quorum that nobody can meet": ("k = 2", "k = 2\nquorum = 3", "quorum below [experts] is 3"),
    "a wait for ever": ("k = 2", "k = 2\ntimeout_seconds = inf", "timeout_seconds below [experts]"),
    "no thread": ("k = 2", "k = 2\nin_flight = 0", "in_flight below [experts] cannot be 0"),
    "a thousand threads": ("k = 2", "k = 2\nin_flight = 1000", "in_flight below [experts] cannot"),
    "an unknown codec": (
        'codec = "none"',
        'codec = "zip"',
        "codec below [experts] cannot be 'zip'",
    ),
    "a sparse codec": (
        'codec = "none"',
        'codec = "sparse-sign"',
        "codec below [experts] cannot be sparse-sign",
    ),
    "an unknown key": ("k = 2", "k = 2\ngrid = 3", "no key 'grid' below [experts]. Did you mean"),
    "no optimizer": (
        "[experts.optimizer]",
        "[experts.optimiser]",
        "optimizer below [experts] is m",
    ),
    "a compiler": (
        "batch = 64",
        "batch = 64\ncompile = true",
        "compile below [training] cannot be true in a run with",
    ),
    "a loss scale": (
        "batch = 64",
        'batch = 64\nprecision = "fp16"',
        "cannot be fp16 in a run with",
    ),
}


@pytest.mark.parametrize(("old", "new", "told"), WRONG.values(), ids=WRONG.keys())
def test_a_mistake_about_experts_is_told_by_its_place(old: str, new: str, told: str) -> None:
    with pytest.raises(WrongDefinition) as caught:
        read_definition(changed(old, new))
    assert any(told in one for one in caught.value.mistakes), caught.value.mistakes


UNSUITABLE = {
    "a width that is not the model's": (
        "width = 16\ninner",
        "width = 8\ninner",
        "[model]: The mixture ffn0 is 16 wide, and its experts 8.",
    ),
    "a grid that the model has no mixture for": (
        '"ffn1"]',
        '"ffn1", "ffn2"]',
        "[model]: grids below [experts] has ffn2, and the model has no such mixture.",
    ),
    "a mixture without a grid": (
        '["ffn0", "ffn1"]',
        '["ffn0"]',
        "[model]: The model has a mixture ffn1, and grids below [experts] has none of this name.",
    ),
    "a model without mixtures": (
        "dmoe_gpt",
        "gpt",
        "[model]: grids below [experts] has ffn0, ffn1, and the model has no such mixture.",
    ),
    "an unknown kind of expert": (
        '"feed-forward"',
        '"feedforward"',
        "[experts.network]: The expert is called 'feedforward', and there is none.",
    ),
    "an unknown key of an expert": (
        "inner = [32]",
        "iner = [32]",
        "There is no key 'iner' below [experts.network]. Did you mean inner?",
    ),
    "an optimizer that there is not": (
        '[experts.optimizer]\nname = "adamw"',
        '[experts.optimizer]\nname = "adam"',
        "[experts.optimizer]: The optimizer is called 'adam'",
    ),
    "experts that take sequences": (
        'name = "feed-forward"\nwidth = 16\ninner = [32]',
        'name = "transformer"\nwidth = 16\nsequence = 16\nheads = 2\ninner = 8',
        "[model]: The experts of the kind transformer take sequences",
    ),
}


@pytest.mark.parametrize(("old", "new", "told"), UNSUITABLE.values(), ids=UNSUITABLE.keys())
def test_run_check_finds_experts_that_do_not_suit_the_model(old: str, new: str, told: str) -> None:
    definition, mistakes = check(changed(old, new))
    assert definition is None
    assert any(told in one for one in mistakes), mistakes


def test_a_right_definition_has_no_mistake() -> None:
    assert check(TEXT)[1] == []


def test_a_model_with_mixtures_needs_experts() -> None:
    _, mistakes = check(TEXT.partition(b"[experts]")[0])
    assert mistakes == [
        "[model]: The model dmoe_gpt has mixtures, and there are no experts for them. In a run, "
        "describe them below [experts]."
    ]


def test_calls_are_counted_as_they_travel() -> None:
    up, down = call_bytes(DEFINITION)
    once = 16 * 2 * 2 * 16 * 4  # tokens, experts of each, mixtures, values, bytes
    assert 3 * once <= up <= 1.1 * 3 * once
    assert 2 * once <= down <= 1.1 * 2 * once
    costs = costs_of(DEFINITION)
    quiet, busy = (costs.traffic(volunteers=1, samples_per_second=each) for each in (0.0, 10.0))
    assert busy.up_bytes_per_hour - quiet.up_bytes_per_hour == 36_000 * up


def test_a_server_holds_what_its_memory_has_room_for() -> None:
    large = read_definition(changed("inner = [32]", "inner = [50000]"))
    held = most_experts(4 << 30, server_bytes(large))
    assert 0 < held * server_bytes(large) < 4 << 30
    assert most_experts(1 << 20, server_bytes(large)) == 0
