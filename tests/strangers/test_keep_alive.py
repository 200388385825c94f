"""Yamux pings cross between strangers and us, and an idle link stays up."""

from __future__ import annotations

import trio

from tests.strangers.conversations import ECHO, echo, exchange
from tests.strangers.sides import Who, linked
from tests.strangers.stranger import Stranger

# js-libp2p is set to ping every 200 ms, and one wrong answer ends the connection there
IDLE_SECONDS = 1.5


async def test_an_idle_link_answers_keep_alives_and_stays_up(
    stranger: Stranger, dialler: Who
) -> None:
    async with (
        linked(stranger, dialler) as link,
        link.ours.serving(ECHO, echo),
        link.theirs.serving(ECHO, echo),
    ):
        await trio.sleep(IDLE_SECONDS)

        for opener in ("we", "they"):
            opening, _ = link.sides(opener)
            stream = await opening.open(ECHO)
            await exchange(stream, 10_000)
            await stream.aclose()


async def test_the_round_trip_is_measured_by_pings_of_the_muxer(
    stranger: Stranger, dialler: Who
) -> None:
    before_the_link = trio.current_time()
    async with linked(stranger, dialler) as link:
        began = trio.current_time()
        measured = await link.network.ping(link.ours.other)
        ended = trio.current_time()
        facts = link.network.link(link.ours.other)

        assert facts is not None
        assert facts.round_trip_seconds is not None
        assert 0 < measured <= ended - began
        assert 0 < facts.round_trip_seconds <= ended - before_the_link
