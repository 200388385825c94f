"""Commands for the directory, and the end of a question that takes too long."""

from __future__ import annotations

import msgspec
import pytest
import trio

from node.core import dht_questions
from node.core.dht_questions import Asked, answer, value_in
from node.core.wrong_use import WrongUse
from protocols.dht import DhtSettings, Families, Family, open_dht
from protocols.errors import DeadlineExceeded
from protocols.rpc import open_rpc
from protocols.testing.world import SimulatedWorld, run_simulation


class Place(msgspec.Struct, frozen=True):
    row: int
    column: int = 0


@pytest.fixture
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    families = Families([Family("count", int), Family("place", Place)])
    monkeypatch.setattr(dht_questions, "FAMILIES", families)


@pytest.mark.usefixtures("_families")
def test_a_text_is_taken_as_it_is_and_anything_else_as_json() -> None:
    assert value_in("note/a", "5") == "5"
    assert value_in("count/a", "5") == 5
    assert value_in("place/a", '{"row": 3}') == Place(3)


@pytest.mark.usefixtures("_families")
@pytest.mark.parametrize("typed", ["five", "", '"5"', "\ud800", "5.5", "[" * 5000])
def test_a_value_that_does_not_fit_the_family_is_wrong_use(typed: str) -> None:
    with pytest.raises(WrongUse, match="family count"):
        value_in("count/a", typed)


async def _asked_alone(world: SimulatedWorld, action: str, question: dict[str, object]) -> object:
    network = world.add_node("node")
    nobody = "/ip4/10.9.9.9/tcp/1/p2p/12D3KooWA7YDSPeLfowyUE7ForqcayjthCYY8LY4nAyTeE31syJR"
    settings = DhtSettings(bootstrap=(nobody,))
    async with open_rpc(network) as rpc, open_dht(network, rpc, settings=settings) as dht:
        return await answer(Asked(dht, network), action, question)


@pytest.mark.parametrize(
    ("action", "question"),
    [
        ("get", {}),
        ("get", {"key": 5}),
        ("put", {"key": "note/a", "value": "x"}),
        ("put", {"key": "note/a", "value": ["x"], "ttl": 60}),
        ("put", {"key": "note/a", "value": "x", "ttl": "long"}),
    ],
)
def test_an_invalid_question_is_wrong_use(action: str, question: dict[str, object]) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        with pytest.raises(WrongUse, match="not a request"):
            await _asked_alone(world, action, question)

    run_simulation(scenario, seed=1)


@pytest.mark.parametrize("seconds", [None, -1, 0, "soon", float("nan")])
def test_how_long_to_try_has_a_default(seconds: object) -> None:
    async def scenario(world: SimulatedWorld) -> None:
        stats = await _asked_alone(world, "stats", {"timeout_seconds": seconds})
        assert isinstance(stats, dict)
        assert stats["peers_in_table"] == 0

    run_simulation(scenario, seed=1)


async def test_a_question_that_takes_too_long_ends_with_what_is_known(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    async def never(_asked: Asked, _question: object) -> object:
        return await trio.sleep_forever()

    monkeypatch.setitem(dht_questions._ACTIONS, "get", never)
    async with SimulatedWorld(seed=1) as world:
        with pytest.raises(DeadlineExceeded, match="knows 0 others"):
            await _asked_alone(world, "get", {"timeout_seconds": 7.0})
    assert trio.current_time() >= 7.0 or autojump_clock.current_time() >= 7.0
