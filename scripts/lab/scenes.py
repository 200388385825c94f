"""Scenes of every state that a trainer can be in, with the words that it says then."""

from __future__ import annotations

import math
from dataclasses import replace

from msgspec.structs import replace as changed

from node.app.screen import Scene, SceneEvent
from node.core.status import (
    ConnectivityStatus,
    DirectoryStatus,
    LinkStatus,
    NodeStatus,
    RelayStatus,
)
from node.core.training_view import (
    BatchView,
    ContributionView,
    ExpertsView,
    GridView,
    RunPeerView,
    TrafficView,
    TrainerPhase,
    TrainerView,
)
from node.training.gate import Closed
from node.training.happenings import Failed, Left
from node.training.phases import NETWORK, Facts, told_of

LOST = "no peer answers at 3 known addresses: connection refused by the machine at 203.0.113.7"
DENIED = Failed(
    "This node may no longer take part in poem: Your access was revoked.",
    "A moderator of the run decided so.",
    "Ask the run's moderators; `potluck whoami` says as whom this node is known.",
    refused=True,
)
DISK = Failed("poem.signed cannot be kept.", "The disk is full.", "Free 5 MB.", refused=False)
GAVE = Left(samples=28_160, steps=84, seconds=4210.0, lost_samples=96)
CHECKPOINT = "/srv/poem/checkpoints/epoch-0000002000-5bbf42dd"


def _peer(number: int, name: str, reach: str, milliseconds: float, rate: float) -> RunPeerView:
    return RunPeerView(
        peer=f"12D3KooWJ8mQyYcVbZ{number:02d}kfDqWzXn{number:02d}",
        said_name=name,
        role="trains",
        reach=reach,
        epoch=312,
        samples=int(rate * 12),
        samples_per_second=rate,
        round_trip_ms=milliseconds,
    )


TRAINING = TrainerView(
    run="poem",
    peer="12D3KooWJ8mQyYcVbZ00kfDqWzXn7Rde",
    person="alice",
    phase=TrainerPhase.TRAINING,
    phase_seconds=43.2,
    doing="computing samples for the next step",
    session_seconds=4210.0,
    epoch=312,
    steps=2000,
    seconds_left=17_300.0,
    loss=2.0713,
    loss_step=312,
    losses=tuple(2.0 + 3.5 * math.exp(-step / 70) + 0.05 * math.sin(step) for step in range(312)),
    batch=BatchView(
        samples=764.0, target=1024, mine=310, samples_per_second=92.4, seconds_to_step=2.8
    ),
    contribution=ContributionView(
        samples=28_160, steps=84, of_samples=86_016.0, samples_per_second=31.2
    ),
    peers=(
        _peer(1, "bob", "direct", 23.4, 44.0),
        _peer(2, "carol", "relayed", 118.0, 12.6),
        _peer(3, "dave", "direct", 61.0, 4.6),
    ),
    traffic=TrafficView(
        sent_bytes=412_000_000,
        received_bytes=433_000_000,
        sent_bytes_per_second=1_230_000.0,
        received_bytes_per_second=1_310_000.0,
        upload_limit=2_000_000.0,
    ),
    device="cpu",
    threads=2,
    micro_batch=32,
    memory_bytes=478_000_000,
    writes="And all the night the water ran\n  beside the mill, and the tome\nof his the sing",
)

EVENTS = (
    SceneEvent("21:04:31", "…DqWzXn03 came (direct)"),
    SceneEvent(
        "21:04:48",
        "step 312 with 4 peers, loss 2.0713: 344 of 1,024 samples are yours",
        kind="step",
    ),
)


def _told(facts: Facts, view: TrainerView) -> Scene:
    told = told_of(facts)
    return Scene(changed(view, phase=told.phase, doing=told.doing, advice=told.advice), EVENTS)


EXPERTS = ExpertsView(
    grids=(GridView(name="ffn0", cells=64, live=41),),
    servers=9,
    most=16,
    hosted=12,
    load_seconds=0.4,
    rows=81_234,
    rows_per_second=1_230.0,
    taken_over=3,
)
START = TrainerView(run="poem", peer=TRAINING.peer, phase_seconds=2.0)
BY_YOU = Closed("pause", "paused by you until 14:00", 1.0)
QUOTA = Closed("quota", "the quota of 200 GB for 2026-11 is used up", 2.0)
SCHEDULE = Closed("schedule", "outside of the schedule (22:00-07:00): goes on at 22:00", 2.0)

STATES = {
    "keeping": _told(
        Facts(begins=True, keeps_only=True),
        changed(TRAINING, keeps_only=True, checkpoint_step=310, checkpoint_age_seconds=52.0),
    ),
    "keeping, and ailing": _told(
        Facts(begins=True, keeps_only=True, alone=True),
        changed(TRAINING, peers=(), keeps_only=True, troubles=("run.toml is gone",)),
    ),
    "training and serving": Scene(changed(TRAINING, experts=EXPERTS), EVENTS),
    "serving": _told(
        Facts(serves_only=True),
        changed(START, serves_only=True, experts=EXPERTS, traffic=TRAINING.traffic),
    ),
    "starting": replace(
        _told(Facts(preparing="fetching the run's definition"), START), events=EVENTS[:1]
    ),
    "catching up": _told(Facts(behind=True), TRAINING),
    "following": _told(Facts(places_taken=256), TRAINING),
    "training": Scene(TRAINING, EVENTS),
    "alone": _told(Facts(alone=True, begins=True), changed(TRAINING, peers=())),
    "averaging": _told(Facts(averaging=True), TRAINING),
    "complete": _told(Facts(complete=True, begins=True, checkpoint=CHECKPOINT), TRAINING),
    "paused": _told(Facts(closed=(BY_YOU,)), TRAINING),
    "network lost": _told(Facts(closed=(Closed(NETWORK, LOST, None),)), TRAINING),
    "paused twice": _told(Facts(closed=(BY_YOU, QUOTA)), TRAINING),
    "out of schedule": _told(Facts(closed=(SCHEDULE,)), START),
    "refused": _told(Facts(failed=DENIED), TRAINING),
    "refused at the door": _told(Facts(failed=DENIED), START),
    "failed": _told(Facts(failed=DISK), START),
    "left": _told(Facts(left=GAVE), TRAINING),
    "completed": _told(Facts(left=GAVE, complete=True), TRAINING),
    "leaving": _told(Facts(leaving=True), TRAINING),
    "leaving at once": _told(Facts(leaving=True, leaving_at_once=True), TRAINING),
}

BACKBONE = NodeStatus(
    links=tuple(
        LinkStatus(peer=peer.peer, reach=peer.reach, bytes_sent=sent)
        for peer, sent in zip(TRAINING.peers, (10**9, 412_000_000, 8_100_000), strict=True)
    ),
    directory=DirectoryStatus(slots_stored=812),
    connectivity=ConnectivityStatus(dial_backs={"reached": 12, "not reached": 3}),
    relay=RelayStatus(
        reservations=12,
        circuits=3,
        most_reservations=128,
        most_circuits=64,
        month="2026-11",
        month_bytes=2 * 10**9,
    ),
)
CAME = tuple(
    SceneEvent(f"20:{minute}:07", words)
    for minute, words in (
        (41, "the run's state is here: step 228, from 2 peers in 1.4 s"),
        (42, "training begins at step 228"),
        (43, "your first samples are in the run: 32 in step 229"),
        (58, "…DqWzXn02 came (relayed)"),
    )
)
PICTURED = {
    "training": Scene(
        changed(TRAINING, steps=500, seconds_left=1_930.0),
        (*CAME, *EVENTS),
        processor=1.9,
        processors=4,
        keys=True,
    ),
    "backbone": replace(
        STATES["keeping"],
        view=changed(STATES["keeping"].view, steps=500, seconds_left=1_930.0, troubles=()),
        node=BACKBONE,
        processor=0.3,
        processors=4,
        keys=True,
    ),
}
"""For the pictures in docs/."""

RELAYING = Scene(
    TrainerView(
        peer=TRAINING.peer,
        phase=TrainerPhase.RELAYING,
        phase_seconds=4210.0,
        session_seconds=4210.0,
        doing="relaying for everybody. Others use it with --bootstrap ADDRESS.",
        keeps_only=True,
        relays_only=True,
        troubles=(),
        peers=tuple(
            RunPeerView(peer=one.peer, reach=one.reach, round_trip_ms=one.round_trip_ms)
            for one in TRAINING.peers
        ),
        traffic=TRAINING.traffic,
        memory_bytes=108_000_000,
    ),
    node=BACKBONE,
    processor=0.1,
    processors=2,
    keys=True,
)
"""`potluck backbone --relay-only`."""

SIZES = ((20, 6), (40, 12), (60, 15), (80, 24), (120, 40), (250, 70))
