"""Experts in a run with an auth server: members serve and train them, and nobody else does."""

from __future__ import annotations

import pytest
import torch
import trio

from auth.refusals import Reason
from auth.roles import Role
from protocols.experts import ExpertSaved, ExpertTaken
from protocols.not_allowed import NotAllowed
from tests.dht.members import member
from tests.experts.hosts import (
    GRID,
    Cast,
    Trainer,
    batch,
    origins,
    saved,
    staged_with,
)
from tests.protocols.admitted import Admission
from tests.waiting import until

MINUTE = 60.0
UID, OTHER = GRID.at(5), GRID.at(6)
EVERY_CELL = [torch.zeros(1, size) for size in GRID.sizes]  # scores: no cell is better


@pytest.mark.slow
@staged_with(Admission)
async def test_the_experts_of_a_revoked_server_are_not_called_and_others_take_them_over(
    cast: Cast,
) -> None:
    revoked, trainer = await cast.server(1, [UID], name="eve"), await cast.trainer()
    await cast.server(1, [OTHER], name="bob")
    await revoked.hosting(1)
    await trainer.train(revoked, UID, steps=3)
    await saved(revoked)
    other = await cast.server(1, [UID], name="ann")
    assert UID in (await trainer.experts.select(EVERY_CELL, GRID.cells))[0]

    await cast.revoke("eve")
    at = trio.current_time()
    with pytest.raises(NotAllowed) as refused:
        await trainer.experts.forward(UID, batch(), 5.0)
    assert refused.value.reason is Reason.REVOKED
    assert UID not in (await trainer.experts.select(EVERY_CELL, GRID.cells))[0], "it is left out"
    await until(lambda: bool(other.told(ExpertTaken)), at + MINUTE - trio.current_time())
    assert origins(other)[UID] == ("taken over", 3)

    async def is_found() -> bool:
        return UID in (await trainer.experts.select(EVERY_CELL, GRID.cells))[0]

    await until(is_found, at + MINUTE - trio.current_time())
    await trainer.experts.forward(UID, batch(), 5.0)
    assert revoked.backend(UID).statistics.forward_rows == 0
    assert (await trainer.live())[UID] == {other.peer}


@pytest.mark.slow
@staged_with(Admission)
async def test_a_revoked_keeper_is_sent_no_more_copies(cast: Cast) -> None:
    server = await cast.server(1, [UID], name="ann")
    eve, trainer = await cast.server(1, [OTHER], name="eve"), await cast.trainer()
    await server.hosting(1)
    await trainer.train(server, UID)
    await saved(server)
    assert eve.kept() == [UID]
    await cast.revoke("eve")
    await trainer.train(server, UID)
    await saved(server)
    (before, after) = (one.keepers for one in server.told(ExpertSaved)[-2:])
    assert (before, after) == ((eve.peer,), ())
    assert eve.host._store.find(UID).steps == 1


@staged_with(lambda: Admission(watcher=(Role.MONITOR,)))
async def test_a_monitor_sees_who_serves_and_may_call_nobody(cast: Cast) -> None:
    server = await cast.server(1, [UID], name="ann")
    await server.hosting(1)
    await trio.sleep(MINUTE)
    watcher = await cast.trainer("watcher")
    assert await watcher.live() == {UID: {server.peer}}
    with pytest.raises(NotAllowed) as refused:
        await watcher.train(server, UID)
    assert refused.value.reason is Reason.ROLE
    assert server.backend(UID).statistics.steps == 0


@staged_with(Admission)
async def test_a_stranger_neither_finds_nor_calls_an_expert(cast: Cast) -> None:
    server = await cast.server(1, [UID], name="ann")
    await server.hosting(1)
    stranger = member(cast.world, "stranger", [server.member], families=server.member.families)
    await stranger.ready.wait()
    await trio.sleep(MINUTE)
    mallory = Trainer(stranger)
    assert await mallory.live() == {}
    with pytest.raises(NotAllowed):
        await mallory.train(server, UID)
    assert server.backend(UID).statistics.steps == 0
