"""Takes part in a run with a running node: from its definition to the last sample.

    async with Node(configuration) as node:
        left = await take_part(node, Participation(run="poem", organiser=fingerprint), session)

In order, as a volunteer sees it: reach other peers, fetch and verify the definition, compare its
costs with the owner's caps, show three lines about the machine's use, build the model, measure for
a few seconds, fetch the run's state, and start the loop.

Promises: nothing but the definition is downloaded before the run is known to fit. Leaving before
the loop has begun takes no longer than leaving the loop.

Importing torch takes seconds, so it starts at once, in a thread, while the node looks for peers.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, Unpack

import trio
from msgspec import structs

from models.errors import ModelsError
from node.core.caps.device_memory import device_bytes, has_own_memory, keep_below
from node.core.caps.devices import AUTO, check_threads, choose_device, devices_here, use_threads
from node.core.caps.memory import PROCESS_BYTES
from node.core.caps.settings import Caps, caps_of
from node.core.caps.units import in_words
from node.core.disk_trouble import disk_trouble
from node.core.node import Node
from node.core.tracker import NamedTracker
from node.run.kept import fetching_folder, remember, remove_fetched_in_part
from node.training.caps_watch import WatchedCaps, open_caps
from node.training.credit import CreditTerms, open_credit
from node.training.happenings import (
    BUILDING,
    LOADING,
    WORKING_OUT,
    Left,
    Notice,
    Preparing,
    WillUse,
)
from node.training.join.bootstrap import definition_of, meet, refuse_if_in_use
from node.training.join.fit import (
    Fit,
    Use,
    beside_training,
    check_any_fits,
    check_fits,
    experts_to_serve,
    machine_memory,
    memory_for_experts,
    serving_lines,
    three_lines,
)
from node.training.join.newer import NewerDefinition
from node.training.join.wish import ServingWish
from node.training.owners_pause import OwnersPause
from node.training.questions import TrainerQuestions
from node.training.session import TrainingSession
from node.training.trackers import track
from protocols.errors import PotluckError
from protocols.runs.serving import ServedDefinitions, serve_definitions

if TYPE_CHECKING:
    from node.run.building import RunTask
    from node.run.costs import Costs
    from node.run.definition import RunDefinition
    from node.run.signed import SignedDefinition
    from node.training.serving import ServingPlan, WatchedExperts
    from node.training.trainer import TrainerOptions

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

OTHERS_IN_PART = "a partly downloaded state of another run is removed."
MEMORY_SECONDS = 1.0  # between two looks at whether memory forces this peer to leave


@dataclass(frozen=True)
class Participation:
    """- `run`, `organiser`: the run, and the fingerprint of the key that defines it.
    - `signed`: its definition, if this is the organiser's own peer; otherwise it is fetched.
    - `signed_file`: where the organiser signs a later one, if this is the organiser's own peer.
    - `trusted`: modules from this machine's disk (--trust-module).
    - `checkpoints`: the folder in which this peer keeps the run's.
    - `begins`: this peer may begin the run: the organiser's first one.
    - `from_peers`: it may not begin it, since it has lost the run's checkpoints; others have the
      state.
    - `keeps_only`: it brings no samples; it reduces, serves the state and keeps the checkpoints.
    - `serving`: which experts it serves, in a run with experts.
    - `trains`: without it, it serves experts and does nothing else.
    - `trackers`: what this machine's owner wants the figures of each step to be written to.
    """

    run: str
    organiser: str
    signed: SignedDefinition | None = None
    signed_file: Path | None = None
    trusted: Mapping[str, Path] = field(default_factory=dict)
    checkpoints: Path | None = None
    begins: bool = False
    from_peers: bool = False
    keeps_only: bool = False
    serving: ServingWish = field(default_factory=ServingWish)
    trains: bool = True
    trackers: tuple[NamedTracker, ...] = ()


class NothingToServe(PotluckError):
    """The run has no experts, and this peer would only serve some."""


async def take_part(node: Node, part: Participation, session: TrainingSession) -> Left | None:
    """The session's result; None if it ended before training began. Once in a node's life.

    Call TrainingSession.entered first. Raises errors that waiting cannot fix: TooLarge, ...
    """

    def tell(words: str) -> None:
        session.happened(Notice(words))

    session.run, session.peer = part.run, node.network.peer_id
    session.name = node.configuration.display_name
    session.person = "" if node.membership is None else node.membership.status().username
    node.training = session.view
    node.machine.follow(tell)
    pause = OwnersPause(node.configuration.places.pause_file)
    questions = TrainerQuestions(node.control, session, pause)
    await questions.take_up()
    caps, places = caps_of(node.configuration), node.configuration.places
    check_threads(caps.threads)
    left: Left | None = None
    prepared: _Prepared | None = None
    async with (
        open_caps(caps, session.gate, places, traffic=node.network.traffic, told=tell) as watched,
        track(part.trackers, session, name=session.name),
        trio.open_nursery() as nursery,
    ):
        node.caps = watched.used
        session.follow(watched.hear)
        nursery.start_soon(questions.run)
        nursery.start_soon(session.show_on)
        nursery.start_soon(_leave_when_memory_is_short, watched, session)
        async with session.departure.cuts_short():
            prepared = await _prepare(node, part, session, watched)
        if prepared is not None:
            nursery.start_soon(prepared.newer.run, part.signed_file)
            left = await _train(node, part, session, prepared, watched)
        nursery.cancel_scope.cancel()
    if watched.must_leave is not None:
        raise watched.must_leave
    return left


@dataclass(frozen=True)
class _Prepared:
    """`plan`: None if this peer serves no experts. Without `ready` it does not train."""

    definition: RunDefinition
    newer: NewerDefinition
    plan: ServingPlan | None
    ready: _ReadyToTrain | None


@dataclass(frozen=True)
class _ReadyToTrain:
    task: RunTask
    fit: Fit


async def _prepare(
    node: Node, part: Participation, session: TrainingSession, watched: WatchedCaps
) -> _Prepared:
    """Everything up to the built model."""
    served, caps = serve_definitions(node.rpc), watched.caps
    check_any_fits(caps, part.run)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_import_torch)
        signed = part.signed
        if signed is None:
            await meet(node, session)
            signed = await definition_of(node, session, part.run, part.organiser)
        served.keep(part.run, signed.data)
        session.happened(Preparing(LOADING))
    session.happened(Preparing(WORKING_OUT))
    own = _as_its_owner_wants(signed, caps, part)
    definition = session.definition = own.definition
    if not part.trains and definition.experts is None:
        raise NothingToServe(
            f"{part.run} has no experts to serve.",
            why="Its definition has no [experts], so each of its peers has the whole model.",
            advice="`potluck join` trains in it.",
        )
    devices, threads = await _in_thread_to_let_go(_devices_of, caps)
    of_device = await _in_thread_to_let_go(device_bytes, devices)
    if has_own_memory(devices):
        watched.leave_batches_alone()
    fit = costs = plan = None
    if part.trains:
        costs = session.costs = await _in_thread_to_let_go(_costs_of, own, part.trusted)
        fit = check_fits(
            costs,
            caps,
            devices,
            definition,
            computes=not part.keeps_only,
            machine_bytes=machine_memory(),
            device_bytes=of_device,
        )
        if not part.begins:
            watched.expect(costs.state_bytes, part.run)
    if definition.experts is not None and not part.keeps_only:
        plan = await _in_thread_to_let_go(
            _plan_of, node, part, signed, caps, devices, of_device, costs
        )
    if fit is not None and costs is not None and plan is not None:
        there = has_own_memory(devices)
        fit = check_fits(
            costs,
            _without(caps, plan.memory_bytes, of_gpu=there),
            devices,
            definition,
            machine_bytes=_less(machine_memory(), 0 if there else plan.memory_bytes),
            device_bytes=_less(of_device, plan.memory_bytes),
        )
    session.happened(WillUse(_lines(part, definition, caps, devices, threads, costs, fit, plan)))
    freed = await _in_thread_to_let_go(_room_made, node, part)
    if freed:
        session.happened(Notice(f"{in_words(freed)} of disk are free again: {OTHERS_IN_PART}"))
    session.happened(Preparing(BUILDING))
    ready = None
    if fit is not None:
        task = await _in_thread_to_let_go(_built, part, own, devices, node.network.peer_id)
        ready = _ReadyToTrain(task, fit)
    await refuse_if_in_use(node, session, part.run)
    newer = _newer_than(signed, served, node, session)
    return _Prepared(definition, newer, plan, ready)


def _as_its_owner_wants(
    signed: SignedDefinition, caps: Caps, part: Participation
) -> SignedDefinition:
    """With the owner's choice in place of the run's, where it may differ at each peer."""
    if part.keeps_only or not part.trains:
        return structs.replace(signed, definition=signed.definition.compiling(False))
    if caps.compile is None:
        return signed
    return structs.replace(signed, definition=signed.definition.compiling(caps.compile))


def _newer_than(
    signed: SignedDefinition, served: ServedDefinitions, node: Node, session: TrainingSession
) -> NewerDefinition:
    def tell(words: str) -> None:
        session.happened(Notice(words))

    async def keep(found: SignedDefinition) -> None:
        with suppress(OSError):  # the disk may be full; then the next start asks for it again
            await trio.to_thread.run_sync(remember, node.configuration.places, found)

    return NewerDefinition(node.network, node.rpc, served, signed, tell=tell, keep=keep)


async def _train(
    node: Node,
    part: Participation,
    session: TrainingSession,
    prepared: _Prepared,
    watched: WatchedCaps,
) -> Left | None:
    """Serve experts, if this peer does, and train, if it does."""
    await node.connectivity.stated.wait()  # what this node does in a round depends on it
    async with _experts_of(node, part, session, prepared) as experts:
        if prepared.ready is not None:
            options = _options(node, part, session, prepared.definition, prepared.ready, watched)
            if experts is not None:
                own = None if experts.host is None else experts.host.runtime
                options = replace(options, experts=experts.directory, own_experts=own)
            return await _train_samples(node, part, session, prepared, prepared.ready, options)
        from node.core.traffic_meter import TrafficMeter
        from node.training.serving import serve_until_left

        caps = watched.caps
        meter = TrafficMeter(caps.upload_bytes_per_second, caps.download_bytes_per_second)
        terms = _credit_terms(part, prepared.definition)
        async with open_credit(node, session, terms, keeps=False):
            await serve_until_left(node, session, meter)
    left = Left(0, 0, round(session.seconds, 3), expert_rows=session.expert_rows)
    session.happened(left)
    return left


@asynccontextmanager
async def _experts_of(
    node: Node, part: Participation, session: TrainingSession, prepared: _Prepared
) -> AsyncIterator[WatchedExperts | None]:
    """Watch the run's experts for the length of the block, and serve some. None if it has none."""
    if prepared.definition.experts is None:
        yield None
        return
    from node.run.experts import directory_name, grids
    from node.training.census import EXPERTS_LIST
    from node.training.serving import WatchedExperts, open_serving
    from protocols.experts import ExpertDirectory

    name = directory_name(prepared.definition)
    directory = ExpertDirectory(node.network, node.dht, name)
    experts = WatchedExperts(directory, part.run, grids(prepared.definition))
    session.experts = experts.view
    node.control.add(EXPERTS_LIST, experts.answer_list)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(experts.watch)
        if prepared.plan is None or not prepared.plan.most:
            yield experts
        else:
            async with open_serving(node.rpc, prepared.plan, experts, session):
                yield experts
        nursery.cancel_scope.cancel()


async def _train_samples(
    node: Node,
    part: Participation,
    session: TrainingSession,
    prepared: _Prepared,
    ready: _ReadyToTrain,
    options: TrainerOptions,
) -> Left:
    from node.training.trainer import train_run

    session.steps = prepared.definition.training.steps
    terms = _credit_terms(part, prepared.definition)
    async with open_credit(node, session, terms, keeps=part.checkpoints is not None):
        return await train_run(node, prepared.definition, ready.task, options, session)


def _credit_terms(part: Participation, definition: RunDefinition) -> CreditTerms:
    training = definition.training
    run = f"{part.run}/{part.organiser}"
    return CreditTerms(run, training.step_samples, training.steps)


def _options(
    node: Node,
    part: Participation,
    session: TrainingSession,
    definition: RunDefinition,
    ready: _ReadyToTrain,
    watched: WatchedCaps,
) -> TrainerOptions:
    from node.training.trainer import TrainerOptions

    caps = watched.caps
    rates = caps.planner_rates()
    folder = _made(node.configuration.places.runs_folder)
    checkpoints = None
    if part.checkpoints is not None:
        checkpoints = replace(
            definition.checkpoint_settings(part.checkpoints, ready.task.plain_model),
            passes_over_broken=part.from_peers,
        )
    return TrainerOptions(
        most_samples=ready.fit.most_samples,
        most_kept_bytes=ready.fit.most_kept_bytes,
        most_followed_bytes=ready.fit.most_followed_bytes,
        has_memory_for=watched.has_memory_for,
        batch_share=lambda: watched.batch_share,
        make_sure=lambda: refuse_if_in_use(node, session, part.run),
        name=node.configuration.display_name,
        begins=part.begins,
        from_peers=part.from_peers,
        keeps_only=part.keeps_only,
        offload=caps.offload,
        checkpoints=checkpoints,
        up_bytes_per_second=rates.up_bytes_per_second,
        down_bytes_per_second=rates.down_bytes_per_second,
        upload_limit=caps.upload_bytes_per_second,
        download_limit=caps.download_bytes_per_second,
        fetching_folder=fetching_folder(node.configuration.places, part.run, part.organiser),
        position_file=folder / f"{part.run}-{part.organiser}.position",
        losses_file=folder / f"{part.run}-{part.organiser}.losses",
    )


def _room_made(node: Node, part: Participation) -> int:
    places = node.configuration.places
    return remove_fetched_in_part(places, but=fetching_folder(places, part.run, part.organiser))


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why, advice = disk_trouble(error, folder)
        raise PotluckError(f"{folder} cannot be made.", why=why, advice=advice) from None
    return folder


async def _leave_when_memory_is_short(watched: WatchedCaps, session: TrainingSession) -> None:
    while True:
        await trio.sleep(MEMORY_SECONDS)
        if watched.must_leave is not None:
            break
    session.departure.leave(error=watched.must_leave)


# -- slow work, in threads that are abandoned on cancellation: nothing waits for them


async def _in_thread_to_let_go(
    function: Callable[[Unpack[Arguments]], Result], *arguments: *Arguments
) -> Result:
    result: Result = await trio.to_thread.run_sync(
        function,
        *arguments,
        abandon_on_cancel=True,  # type: ignore[call-arg] # the stubs are of an older trio
    )
    return result


async def _import_torch() -> None:
    await _in_thread_to_let_go(importlib.import_module, "node.training.trainer")


def _costs_of(signed: SignedDefinition, trusted: Mapping[str, Path]) -> Costs:
    from node.run.costs import costs_of

    with _told_as_the_definitions(signed):
        return costs_of(signed.definition, trusted)


@contextmanager
def _told_as_the_definitions(signed: SignedDefinition) -> Iterator[None]:
    """Models' errors about the tables are for the organiser: raise UnusableDefinition here."""
    from node.run.mistakes import WrongDefinition
    from node.run.signed import unusable

    try:
        yield
    except (ModelsError, WrongDefinition) as error:
        raise unusable(error, signed.version, signed.signed_ms) from None


def _devices_of(caps: Caps) -> tuple[tuple[str, ...], int]:
    """All GPUs of this machine are one peer, unless the owner named one. Their memory is capped
    from here on."""
    threads = use_threads(caps.threads)
    devices: tuple[str, ...] = (str(choose_device(caps.device)),)
    if caps.device == AUTO:
        devices = tuple(one for one in devices_here() if one.startswith("cuda")) or devices
    keep_below(caps.device_memory_bytes, devices)
    return devices, threads


def _built(
    part: Participation, signed: SignedDefinition, devices: tuple[str, ...], peer: str
) -> RunTask:
    from node.run.building import build_task

    with _told_as_the_definitions(signed):
        return build_task(signed.definition, device=devices, peer=peer, trusted=part.trusted)


COPIES_FOR_EACH = 6
"""The disk for others' copies, in multiples of the own experts'. Each is kept at three others, and
with few servers some have more of them than others."""
LEAST_COPIES_BYTES = 64 << 20


def _plan_of(
    node: Node,
    part: Participation,
    signed: SignedDefinition,
    caps: Caps,
    devices: tuple[str, ...],
    of_device: int | None,
    costs: Costs | None,
) -> ServingPlan:
    """TooLarge, or WrongUid if the run does not have the cells that the owner names."""
    from node.run.experts import grids, maker, saved_bytes, server_bytes
    from node.run.kept import experts_folder
    from node.training.join.fit import REQUESTS_BYTES
    from node.training.serving import ServingPlan
    from protocols.experts import CHECKPOINT_SECONDS, HostSettings

    definition, wish = signed.definition, part.serving
    with _told_as_the_definitions(signed):
        all_grids, make = grids(definition), maker(definition, part.trusted, device=devices[0])
        each, saved = (size(definition, part.trusted) for size in (server_bytes, saved_bytes))
    uids = wish.cells_of(all_grids)
    if has_own_memory(devices):
        training = 0 if costs is None else costs.gpu_bytes(1, offload=caps.offload)
        room = memory_for_experts(caps.device_memory_bytes, of_device, training, on_gpu=True)
    else:
        training = 0 if costs is None else costs.memory_bytes(1)
        room = memory_for_experts(caps.memory_bytes, machine_memory(), training)
    cells = sum(grid.cells for grid in all_grids)
    most = experts_to_serve(part.run, wish, len(uids), cells, each, room)
    if not (most or part.trains):
        most = experts_to_serve(part.run, ServingWish(1), 0, cells, each, room)  # TooLarge
    checkpoint_seconds = min(CHECKPOINT_SECONDS, definition.checkpoints.every_seconds)
    copies = max(LEAST_COPIES_BYTES, COPIES_FOR_EACH * most * saved)
    return ServingPlan(
        run=part.run,
        grids=all_grids,
        make=make,
        folder=experts_folder(node.configuration.places, part.organiser, definition),
        settings=HostSettings(most, uids, checkpoint_seconds, largest_copies_bytes=copies),
        memory_bytes=most * each + REQUESTS_BYTES if most else 0,
        disk_bytes=2 * most * saved + copies,  # the own ones, and earlier ones put aside
    )


def _without(caps: Caps, taken_bytes: int, *, of_gpu: bool) -> Caps:
    """The caps of what is left for training."""
    if of_gpu:
        return replace(caps, device_memory_bytes=_less(caps.device_memory_bytes, taken_bytes))
    return replace(caps, memory_bytes=_less(caps.memory_bytes, taken_bytes))


def _less(whole: int | None, taken_bytes: int) -> int | None:
    return None if whole is None else whole - taken_bytes


def _lines(
    part: Participation,
    definition: RunDefinition,
    caps: Caps,
    devices: tuple[str, ...],
    threads: int,
    costs: Costs | None,
    fit: Fit | None,
    plan: ServingPlan | None,
) -> tuple[str, ...]:
    use = Use(
        run=definition.name,
        description=definition.run.description,
        devices=devices,
        threads=threads,
        memory_bytes=0,
        state_bytes=0,
        disk_bytes=0,
        round_bytes=0,
        caps=caps.words(),
        begins=part.begins,
    )
    if costs is None or fit is None:
        assert plan is not None
        memory = plan.memory_bytes + (0 if has_own_memory(devices) else PROCESS_BYTES)
        return serving_lines(use, plan.most, memory, plan.disk_bytes)
    most, on_gpu = fit.most_samples, has_own_memory(devices)
    each = -(-most // len(devices))  # each of several GPUs computes a part
    lines = three_lines(
        replace(
            use,
            memory_bytes=costs.memory_bytes(most, on_gpu=on_gpu, offload=caps.offload),
            gpu_bytes=costs.gpu_bytes(each, offload=caps.offload) if on_gpu else 0,
            state_bytes=costs.state_bytes,
            disk_bytes=costs.disk_bytes if part.checkpoints is None else costs.keeper_disk_bytes,
            round_bytes=costs.round_bytes,
        )
    )
    if plan is None or not plan.most:
        return lines
    machine, network, stop = lines
    return machine, network, beside_training(plan.most, plan.memory_bytes, devices), stop
