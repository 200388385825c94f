"""One real round on the simulated network, from a signed list to its decision.

    ended = one_round("rrda", Fate(member=2, message=17, how="killed"))
    ended.check()

The cast names the members in the order of the list: `r` brings data and reduces, `d` brings data
and can only dial out, `a` is auxiliary: it reduces, and brings nothing. Every member runs
`run_round` as a node does, with an rpc, a butterfly and a switchboard of its own; only the search
for the group is left out, and the list is made here. So a member's first message is the first of
the round, and something can befall it instead of any of its messages.

`RoundEnded.check` has the conditions afterwards: all members that commit hold the same bits, which
are the average of the same members in every part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import trio
from torch import Tensor

from protocols.moshpit.agreement import Timing
from protocols.moshpit.bandwidth import Bandwidth
from protocols.moshpit.butterfly import Butterfly
from protocols.moshpit.group import Group
from protocols.moshpit.layout import Layout, Segment
from protocols.moshpit.roster import (
    NONCE_BYTES,
    Offer,
    Roster,
    Terms,
    hash_order,
    sign_entry,
    sign_roster,
)
from protocols.moshpit.round import Buffers, Finished, Shell, Task, run_round
from protocols.moshpit.switchboard import Switchboard
from protocols.moshpit.verdicts import Commit, Discard, MemberLeftOut
from protocols.rpc import open_rpc
from protocols.testing.world import (
    LinkSettings,
    NodeSettings,
    SimulatedNetwork,
    SimulatedWorld,
    WorldSettings,
    run_simulation,
)

LATENCY_SECONDS = 0.01
CHUNK_BYTES = 4_096
VALUES_OF_A_PART = 2_048  # two chunks: one is under way while the other is reduced
ROUND_SECONDS = 30.0
LONGEST_SECONDS = 600.0  # of virtual time: a longer wait would never end

WORLD = WorldSettings(link=LinkSettings(latency_seconds=LATENCY_SECONDS))

How = Literal["killed", "killed and heard out", "stopped"]


@dataclass(frozen=True)
class Fate:
    """A fault of one member in place of its message with this number; the first is 1.

    A stopped one goes on when the round is over for the others.
    """

    member: int
    message: int
    how: How = "killed"


@dataclass(eq=False)
class Member:
    """One member's round. `finished` stays None if it died before the end."""

    place: int
    weight: float
    network: SimulatedNetwork
    values: Tensor
    result: Tensor
    finished: Finished | None = None
    ended: float = 0.0
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def committed(self) -> Commit | None:
        verdict = None if self.finished is None else self.finished.verdict
        return verdict if isinstance(verdict, Commit) else None


@dataclass(frozen=True)
class RoundEnded:
    """A round that is over for all living members. Moments are of the world's clock."""

    members: tuple[Member, ...]
    fates: tuple[Fate, ...]
    befell: dict[int, float]  # when, for each peer that has sent so many messages
    messages_sent: tuple[int, ...]

    @property
    def survivors(self) -> list[Member]:
        return [one for one in self.members if one.place not in self.befell]

    @property
    def seconds_after(self) -> float:
        """The time from the last fault until the round was over for all other members."""
        return max(one.ended for one in self.survivors) - max(self.befell.values())

    def check(self) -> None:
        """The promise of a round. Raises AssertionError, with the fate that broke it."""
        commits = [(one, one.committed) for one in self.members if one.committed is not None]
        for one, commit in commits:
            first, agreed = commits[0]
            assert commit == agreed, f"{self.fates}: {commit} at {one.place} is not {agreed}"
            expected = self.average_of(agreed.members)
            torch.testing.assert_close(one.result.double(), expected, rtol=1e-5, atol=1e-6)
            same = torch.equal(one.result.view(torch.int32), first.result.view(torch.int32))
            assert same, f"{self.fates}: members {first.place} and {one.place} differ"
        for one in self.members:
            self._check_end(one, [commit for _, commit in commits])

    def _check_end(self, one: Member, commits: list[Commit]) -> None:
        """No member hangs, and no member believes anything false about the others."""
        if one.finished is None:
            assert one not in self.survivors, f"{self.fates}: member {one.place} has not ended"
            return
        match one.finished.verdict:
            case MemberLeftOut(members=members):
                assert commits, f"{self.fates}: {one.place} was left out, and nobody committed"
                assert commits[0].members == members, f"{self.fates}: {one.place} was told wrongly"
            case Discard(in_doubt=False):
                assert not commits, f"{self.fates}: {one.place} is sure, and others committed"

    def average_of(self, members: tuple[int, ...]) -> Tensor:
        """The weighted average of these members' values, in double precision."""
        counted = [self.members[place] for place in members]
        total = sum(one.weight for one in counted)
        shares = [one.values.double() * (one.weight / total) for one in counted]
        return torch.stack(shares).sum(dim=0)


@dataclass(frozen=True)
class Rogue:
    """A member that exchanges, and takes part in the round, in its own way."""

    member: int
    butterfly: type[Butterfly]
    take_part: Callable[[Shell, Task, Buffers], Awaitable[Finished]]


@dataclass(frozen=True)
class Setting:
    """The values of a round, and its network. Rates are bytes per second, by the place in the list:
    `up` and `down` of the machines (none: without limit), and what each declares of both (0: that
    it does not know). `later` is called when the world has begun, and may change it meanwhile."""

    values: int = 0  # 0: VALUES_OF_A_PART for each member
    round_seconds: float = ROUND_SECONDS
    chunk_bytes: int = CHUNK_BYTES
    up: Mapping[int, float] = field(default_factory=dict)
    down: Mapping[int, float] = field(default_factory=dict)
    declared: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    later: Callable[[SimulatedWorld, Sequence[SimulatedNetwork]], Awaitable[None]] | None = None
    world: WorldSettings = WORLD


ORDINARY = Setting()


def one_round(
    cast: str,
    *fates: Fate,
    seed: int = 0,
    rogue: Rogue | None = None,
    setting: Setting = ORDINARY,
) -> RoundEnded:
    """A round of this cast, in a world of its own. At most one fate for each member."""
    return run_simulation(_round, cast, fates, rogue, setting, seed=seed, settings=setting.world)


async def _round(
    world: SimulatedWorld,
    cast: str,
    fates: tuple[Fate, ...],
    rogue: Rogue | None,
    setting: Setting,
) -> RoundEnded:
    layout = Layout((Segment("w", setting.values or VALUES_OF_A_PART * len(cast), "none"),))
    terms = Terms("group/test/0/0/all", 0, layout.digest)
    networks = _nodes(world, terms, cast, setting)
    for one in networks:  # as they are when they have found each other
        for other in networks:
            if other is not one and other.settings.dialable:
                await one.connect(other.peer_id)
    roster = _signed(terms, networks, cast, setting)
    places = {network.peer_id: network for network in networks}
    members = tuple(
        Member(
            place,
            entry.weight,
            places[entry.peer],
            torch.randn(layout.values, generator=torch.Generator().manual_seed(place)),
            torch.full((layout.values,), torch.nan),
        )
        for place, entry in enumerate(roster.entries)
    )
    befell: dict[int, float] = {}
    for fate in fates:
        _arrange(world, members[fate.member], fate, befell)
    for one in members:
        its_way = rogue if rogue is not None and rogue.member == one.place else None
        world.start(one.network, _process_of(one, roster, layout, its_way, setting))
    if setting.later is not None:
        await setting.later(world, networks)
    victims = [members[fate.member] for fate in fates]
    with trio.fail_after(LONGEST_SECONDS):
        for one in members:
            if one not in victims:
                await one.done.wait()
        for one in victims:
            world.resume(one.network)
        for one in victims:
            await one.done.wait()
    sent = tuple(one.network.messages_sent for one in members)
    return RoundEnded(members, fates, befell, sent)


def _arrange(world: SimulatedWorld, victim: Member, fate: Fate, befell: dict[int, float]) -> None:
    def strike() -> None:
        befell[victim.place] = trio.current_time()
        if fate.how == "stopped":
            world.stop(victim.network)
        else:
            world.crash(victim.network, heard_out=fate.how == "killed and heard out")

    world.at_message(victim.network, fate.message, strike)


def _nodes(
    world: SimulatedWorld, terms: Terms, cast: str, setting: Setting
) -> list[SimulatedNetwork]:
    """A node for each of the cast, in the order of the list."""
    names = [f"member-{number}" for number in range(len(cast))]
    names.sort(key=lambda name: hash_order(terms.key, world.identity_of(name).peer_id))
    networks = [
        world.add_node(
            name,
            NodeSettings(
                dialable=part != "d",
                upload_bytes_per_second=setting.up.get(place),
                download_bytes_per_second=setting.down.get(place),
            ),
        )
        for place, (name, part) in enumerate(zip(names, cast, strict=True))
    ]
    world.introduce(*networks)
    return networks


def _signed(terms: Terms, networks: list[SimulatedNetwork], cast: str, setting: Setting) -> Roster:
    """The list of all of these, with different weights, led by the first that can be dialled."""
    leader = next(one for one in networks if one.settings.dialable)
    entries = []
    for place, (one, part) in enumerate(zip(networks, cast, strict=True)):
        weight = 0.0 if part == "a" else place + 1.0
        offer = Offer(weight, *setting.declared.get(place, (0, 0)), reduces=part != "d")
        nonce = bytes(NONCE_BYTES)
        entries.append(sign_entry(one.identity, terms, leader.peer_id, offer, nonce))
    return sign_roster(leader.identity, terms, entries, 0, bytes(NONCE_BYTES))


def _process_of(
    one: Member, roster: Roster, layout: Layout, rogue: Rogue | None, setting: Setting
) -> Callable[[SimulatedNetwork], Awaitable[None]]:
    async def process(network: SimulatedNetwork) -> None:
        async with open_rpc(network) as rpc, trio.open_nursery() as nursery:
            way = rogue or Rogue(one.place, Butterfly, run_round)
            butterfly, switchboard = way.butterfly(rpc, network), Switchboard(rpc)
            shell = Shell(network, rpc, butterfly, switchboard, Bandwidth(), nursery)
            group = Group(roster, one.place, roster.round_id)
            timing = Timing(round_seconds=setting.round_seconds)
            task = Task(group, layout, setting.chunk_bytes, timing)
            try:
                one.finished = await way.take_part(shell, task, Buffers(one.values, one.result))
                one.ended = trio.current_time()
            finally:
                one.done.set()  # also when it was killed
            await trio.sleep_forever()

    return process
