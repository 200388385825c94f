"""A newcomer gets a run's definition from any of its peers, and trusts only the organiser."""

from __future__ import annotations

from collections.abc import Awaitable
from contextlib import AsyncExitStack
from functools import partial

import pytest
import trio

from node.run.definition import NewerPotluckNeeded
from node.run.signed import SignedDefinition, read_signed, sign_definition
from protocols.errors import ProtocolMisuse
from protocols.rpc import Rpc, open_rpc
from protocols.runs.fetching import FETCH_SECONDS, OTHERS_SECONDS, fetch_definition
from protocols.runs.messages import (
    DEFINITION,
    LARGEST_DEFINITION_BYTES,
    DefinitionRequest,
    DefinitionResponse,
    NoDefinition,
    NotTheDefinition,
)
from protocols.runs.serving import serve_definitions
from tests.protocols.pair import FIRST_CALL_SECONDS, Pair, between_two
from tests.runs.definitions import FINGERPRINT, MALLORY, NAME, NOW_MS, ORGANISER, TEXT

OLD = sign_definition(TEXT, ORGANISER, now_ms=NOW_MS)
NEW = sign_definition(TEXT + b"# changed\n", ORGANISER, now_ms=NOW_MS + 1)
FORGED = sign_definition(TEXT, MALLORY, now_ms=NOW_MS + 2)

accept = partial(read_signed, run=NAME, organiser=FINGERPRINT)


def keeping(rpc: Rpc, data: bytes | None) -> None:
    served = serve_definitions(rpc)
    if data is not None:
        served.keep(NAME, data)


async def hang(_caller: object, _request: DefinitionRequest) -> DefinitionResponse:
    await trio.sleep_forever()
    raise AssertionError


def fetched(
    *data: bytes | None,
    known: SignedDefinition | None = None,
    one_hangs: bool = False,
) -> tuple[SignedDefinition, float]:
    """What Alice takes from Bob and others who have these, and the seconds of it. `one_hangs`:
    another one is asked, and never answers."""

    async def scenario(pair: Pair) -> tuple[SignedDefinition, float]:
        async with AsyncExitStack() as running:
            keeping(pair.answering, data[0])
            peers = [pair.bob_id]
            for number, more in enumerate(data[1:]):
                node = pair.world.add_node(f"other{number}")
                pair.world.introduce(pair.alice, node)
                keeping(await running.enter_async_context(open_rpc(node)), more)
                peers.append(node.peer_id)
            if one_hangs:
                node = pair.world.add_node("silent")
                pair.world.introduce(pair.alice, node)
                (await running.enter_async_context(open_rpc(node))).serve(DEFINITION, hang)
                peers.append(node.peer_id)
            began = trio.current_time()
            found = await fetch_definition(pair.asking, peers, NAME, accept, known=known)
            return found, trio.current_time() - began
        raise AssertionError

    return between_two(scenario)


def test_one_peer_that_has_it_is_enough() -> None:
    found, seconds = fetched(NEW)
    assert found.data == NEW
    assert seconds == pytest.approx(FIRST_CALL_SECONDS, rel=0.1)


def test_the_newest_of_what_peers_have_is_taken() -> None:
    assert fetched(OLD, NEW, OLD)[0].data == NEW


def test_a_forger_changes_nothing_and_costs_nothing() -> None:
    found, seconds = fetched(FORGED, OLD, b"garbage", None)
    assert found.data == OLD
    assert seconds < FIRST_CALL_SECONDS + OTHERS_SECONDS


def test_a_peer_that_has_the_definition_does_not_download_it_again() -> None:
    known = accept(NEW)
    assert fetched(NEW, OLD, known=known)[0] is known
    assert fetched(NEW, known=accept(OLD))[0].data == NEW


@pytest.mark.parametrize("known", [None, accept(OLD)], ids=["unknown", "known"])
def test_one_peer_that_says_nothing_does_not_hold_up_the_others(
    known: SignedDefinition | None,
) -> None:
    found, seconds = fetched(OLD, known=known, one_hangs=True)
    assert found.data == OLD
    assert OTHERS_SECONDS < seconds < FIRST_CALL_SECONDS + OTHERS_SECONDS + 0.1


def test_nobody_who_has_it_is_told_with_what_each_said() -> None:
    with pytest.raises(NoDefinition, match="not in this run") as caught:
        fetched(None)
    assert caught.value.exit_code == 4


def test_only_forgers_is_a_refusal_with_the_reason() -> None:
    with pytest.raises(NotTheDefinition, match="signed by somebody else"):
        fetched(FORGED)


def needing_a_later_potluck(signed_ms: int) -> bytes:
    from node.run.signed import _DEFINITIONS, _Document

    text = TEXT + b'[limits]\nleast_version = "99.0"'
    return _DEFINITIONS.sign(_Document(text, ORGANISER.public_key, signed_ms), ORGANISER)


def test_the_newest_decides_also_where_this_potluck_is_too_old_for_it() -> None:
    later, earlier = needing_a_later_potluck(NOW_MS + 9), needing_a_later_potluck(NOW_MS - 9)
    with pytest.raises(NewerPotluckNeeded):
        fetched(later, known=accept(OLD))
    with pytest.raises(NewerPotluckNeeded):
        fetched(OLD, later)
    with pytest.raises(NewerPotluckNeeded):
        fetched(later, OLD)
    assert fetched(OLD, earlier)[0].data == OLD, "the organiser has taken it back"


def test_another_run_is_not_mixed_up_with_this_one() -> None:
    async def scenario(pair: Pair) -> None:
        serve_definitions(pair.answering).keep("prose", OLD)
        with pytest.raises(NoDefinition):
            await fetch_definition(pair.asking, [pair.bob_id], NAME, accept)

    between_two(scenario)


def test_it_ends_in_time_whatever_the_others_do() -> None:
    async def scenario(pair: Pair) -> None:
        pair.answering.serve(DEFINITION, hang)
        began = trio.current_time()
        with pytest.raises(NoDefinition):
            await fetch_definition(pair.asking, [pair.bob_id], NAME, accept)
        assert trio.current_time() - began <= FETCH_SECONDS + 0.1

    between_two(scenario)


def test_nobody_to_ask_is_told() -> None:
    async def scenario(pair: Pair) -> None:
        with pytest.raises(NoDefinition, match="no peer that could be asked"):
            await fetch_definition(pair.asking, [], NAME, accept)

    between_two(scenario)


@pytest.mark.parametrize("size", [0, LARGEST_DEFINITION_BYTES + 1])
def test_an_unacceptable_definition_is_not_served(size: int) -> None:
    def attempt(pair: Pair) -> Awaitable[None]:
        async def scenario() -> None:
            with pytest.raises(ProtocolMisuse):
                serve_definitions(pair.answering).keep(NAME, bytes(size))

        return scenario()

    between_two(attempt)
