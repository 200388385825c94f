"""A newcomer asks for the run's definition until one answer has the organiser's signature."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from node.run.signed import read_signed, sign_definition
from node.training.join.bootstrap import FORGED_SECONDS, LONGEST_RETRY_SECONDS, DefinitionAsker
from protocols.rpc import open_rpc
from protocols.runs.messages import NotTheDefinition
from protocols.runs.serving import serve_definitions
from tests.protocols.pair import Pair, between_two
from tests.runs.definitions import FINGERPRINT, MALLORY, NAME, NOW_MS, ORGANISER, TEXT

GENUINE = sign_definition(TEXT, ORGANISER, now_ms=NOW_MS)
FORGED = sign_definition(TEXT, MALLORY, now_ms=NOW_MS + 1)

accept = partial(read_signed, run=NAME, organiser=FINGERPRINT)


def asker(pair: Pair, told: list[str]) -> DefinitionAsker:
    return DefinitionAsker(
        pair.alice, pair.asking, (f"/ip4/192.0.2.1/p2p/{pair.bob_id}",), told.append
    )


def test_a_forger_who_is_met_first_does_not_keep_the_others_from_being_asked() -> None:
    async def scenario(pair: Pair) -> None:
        told: list[str] = []
        serve_definitions(pair.answering).keep(NAME, FORGED)
        await pair.alice.connect(pair.bob_id)
        carol = pair.world.add_node("carol")
        pair.world.introduce(pair.alice, carol)
        async with open_rpc(carol) as honest, trio.open_nursery() as nursery:
            serve_definitions(honest).keep(NAME, GENUINE)

            async def come_later() -> None:
                await trio.sleep(FORGED_SECONDS / 2)
                await pair.alice.connect(carol.peer_id)

            nursery.start_soon(come_later)
            found = await asker(pair, told).until_known(NAME, accept, None)
        assert found.data == GENUINE
        assert len(told) == 1
        assert "signed by somebody else" in told[0]

    between_two(scenario)


def test_if_only_forgeries_come_the_search_ends() -> None:
    async def scenario(pair: Pair) -> None:
        serve_definitions(pair.answering).keep(NAME, FORGED)
        await pair.alice.connect(pair.bob_id)
        began = trio.current_time()
        with pytest.raises(NotTheDefinition):
            await asker(pair, []).until_known(NAME, accept, None)
        assert trio.current_time() - began < FORGED_SECONDS + 2 * LONGEST_RETRY_SECONDS

    between_two(scenario)


@asynccontextmanager
async def another_without_it(pair: Pair, name: str) -> AsyncIterator[None]:
    other = pair.world.add_node(name)
    async with open_rpc(other) as rpc:
        serve_definitions(rpc)
        pair.world.introduce(pair.alice, other)
        await pair.alice.connect(other.peer_id)
        yield


@pytest.mark.slow
def test_if_nobody_has_the_definition_yet_it_is_asked_for_until_somebody_does() -> None:
    async def scenario(pair: Pair) -> None:
        told: list[str] = []
        served = serve_definitions(pair.answering)
        await pair.alice.connect(pair.bob_id)
        async with (
            another_without_it(pair, "carol"),
            another_without_it(pair, "dave"),
            trio.open_nursery() as nursery,
        ):

            async def begin_after_an_hour() -> None:
                await trio.sleep(3600.0)
                served.keep(NAME, GENUINE)

            nursery.start_soon(begin_after_an_hour)
            found = await asker(pair, told).until_known(NAME, accept, None)
        assert found.data == GENUINE
        assert trio.current_time() > 3600.0
        assert len(told) == 1
        assert "not in this run" in told[0]
        assert "It is tried again" in told[0]

    between_two(scenario)
