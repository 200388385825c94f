"""Whether a peer can be dialled, asked without touching the link to it."""

from __future__ import annotations

import pytest
import trio

from protocols.errors import Unreachable
from tests.contract.neighbourhood import Neighbourhood, on_both


@on_both
async def test_a_peer_that_listens_is_found_dialable_and_gets_no_link(
    place: Neighbourhood,
) -> None:
    asker, listener = await place.network(), await place.network()
    dead = f"{place.dead_address()}/p2p/{listener.peer_id}"
    good = listener.addresses()[0]
    with trio.fail_after(20):
        assert await asker.check_dialable(listener.peer_id, [dead, good]) == good
    await place.settle()
    assert asker.link(listener.peer_id) is None
    assert listener.link(asker.peer_id) is None


@on_both
async def test_an_existing_link_stays_as_it_is(place: Neighbourhood) -> None:
    asker, listener = await place.pair()
    await listener.connect(asker.peer_id)
    await place.settle()
    before = asker.link(listener.peer_id)
    assert before is not None
    assert before.inbound
    await asker.check_dialable(listener.peer_id, listener.addresses())
    await place.settle()
    after = asker.link(listener.peer_id)
    assert after is not None
    assert after.connected_at == before.connected_at


@on_both
async def test_addresses_at_which_nobody_or_somebody_else_answers_prove_nothing(
    place: Neighbourhood,
) -> None:
    asker, listener, other = [await place.network() for _ in range(3)]
    elsewhere = other.addresses()[0].removesuffix(f"/p2p/{other.peer_id}")
    with pytest.raises(Unreachable):
        await asker.check_dialable(listener.peer_id, [elsewhere, place.dead_address()])
    with pytest.raises(Unreachable):
        await asker.check_dialable(listener.peer_id, [])
