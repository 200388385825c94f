"""The experts of a run follow from its definition, the same ones at every server."""

from __future__ import annotations

import msgspec
import pytest
import torch

from node.run.definition import ExpertsSection, incompatible_parts, read_definition
from node.run.experts import grids, maker, saved_bytes, section_of, server_bytes
from node.run.template import new_definition
from protocols.errors import ProtocolMisuse
from protocols.experts import ExpertGrid, Uid
from tests.runs.definitions import TEXT as WITHOUT
from tests.runs.expert_definitions import TEXT, changed

DEFINITION = read_definition(TEXT)
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
    assert backend.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)  # a third, in warm-up
    before = [one.detach().clone() for one in backend.network.parameters()]
    backend.backward(torch.ones(3, 16), torch.ones(3, 16))
    assert backend.optimizer.param_groups[0]["lr"] == pytest.approx(0.002)
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
        ("inner = [8]", "inner = [9]", ["network below [experts]"]),
        ('codec = "none"', 'codec = "float16"', []),
    ],
)
def test_other_experts_are_another_way_of_training(old: str, new: str, told: list[str]) -> None:
    assert incompatible_parts(DEFINITION, read_definition(changed(old, new))) == told


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
