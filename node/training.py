"""A training loop as the guest of a node: for an ordinary script, and on a node that runs already.

    with collaborate(run="poem", batch=512, bootstrap=[...]) as bridge:    # a script of your own
        optimizer = CollaborativeOptimizer(model.named_parameters(), torch.optim.AdamW, bridge)
        ...                                                                # your loop as it was

    async with open_training(node, settings) as collaboration:             # on a running node
        ...
    await train_in_thread(node, settings, train)                           # the same, and the loop

`collaborate` runs a node, with its directory, averager and state, in a thread of its own, and ends
it with the block: after the last line, after an error, and after Ctrl-C, which reaches the main
thread as ever. A thread is enough: beside 50 MB/s a training loop keeps nine tenths of its speed
and more, if its steps take longer than some ten milliseconds (`potluck bench interference`).

Promises: nothing of the node is left when the block has been left. If the node fails, whatever the
loop waits for in the bridge raises, and what comes out of the block is the node's own error.

Easy to get wrong: the home. Two nodes cannot have the same one, so scripts that run side by side
on one machine need one each (`home=`, or POTLUCK_HOME).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import trio

from node.checkpoint_keeper import CheckpointSettings, open_keeper
from node.configuration import Configuration, read_configuration
from node.node import Node, OpenNetwork, open_real_network
from node.settings import Value
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import (
    Collaboration,
    CollaborationSettings,
    open_collaboration,
)
from protocols.accumulation.ended import CollaborationEnded
from protocols.dht.bootstrap import Joined
from protocols.errors import PotluckError, Unreachable
from protocols.moshpit.layout import CodecName
from protocols.moshpit.settings import MATCHMAKING_SECONDS
from protocols.not_allowed import NotAllowed

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


MEETING_SECONDS = 60.0
"""How long the places to join at may take to answer. On a good day it is a tenth of a second; a
place that has just been started, or a machine on a bad link, needs some tries."""

LOOKING_BACK_SECONDS = 10.0
"""The same where there are only peers of an earlier life, who may all be gone."""


class NotInThisRun(PotluckError):
    """The pass in this node's home is for another run, or not for training."""


class NobodyAnswers(Unreachable):
    """There are places to join at, and none of them answers."""


async def _nothing(_collaboration: Collaboration) -> None:
    """What is done beside a loop that nobody watches."""


def _wakes_nothing() -> None:
    """For a loop that waits for nothing but the collaboration."""


@contextmanager
def collaborate(
    *,
    run: str,
    batch: int,
    bootstrap: Sequence[str] = (),
    listen: Sequence[str] = (),
    home: Path | str | None = None,
    client: bool = False,
    codec: CodecName | Mapping[str, CodecName] = "none",
    grace_seconds: float = MATCHMAKING_SECONDS,
    checkpoints: CheckpointSettings | Path | str | None = None,
    begins: bool = True,
    open_network: OpenNetwork = open_real_network,
) -> Iterator[Bridge]:
    """Take part in a run from an ordinary script, until the block ends.

    - `run`, `batch`: the run's name, and the samples of one step of all peers together. All peers
      say the same.
    - `bootstrap`: addresses of peers to join through; none for the first one, and none for a
      member, whose pass names them.
    - `listen`: where others can dial this node; by default any free port of every interface.
    - `home`: where the node keeps its key, its pass and what it knows (POTLUCK_HOME, or the
      platform's place).
    - `client`: nobody can dial this node, so it keeps and reduces nothing for others.
    - `codec`: how averaged values travel, for all or by the parameters' names.
    - `grace_seconds`: how long a round waits for those who are expected and not there yet.
    - `checkpoints`: a folder (or CheckpointSettings) in which this peer keeps the run's: the
      optimizer begins from the newest one, and others are written while it trains.
    - `begins`: False in the scripts of volunteers, where somebody keeps checkpoints: they then
      never begin the run anew, but wait for that peer, or for others who train.
    - `open_network`: what the node stands on, for labs that limit it or break it.

    What is not given here comes from the node's settings (environment, then file), as for any
    command. Whatever keeps the node from starting is raised before the block begins.
    """
    flags: dict[str, Value] = {}
    if bootstrap:
        flags["dht.bootstrap"] = tuple(bootstrap)
    if listen:
        flags["network.listen"] = tuple(listen)
    if client:
        flags["dht.client"] = True
    configuration = read_configuration(flags, home=None if home is None else str(home))
    settings = CollaborationSettings(
        run=run,
        target_batch=batch,
        codec=codec,
        grace_seconds=grace_seconds,
        client=configuration.is_client,
        begins=begins,
    )
    if isinstance(checkpoints, str | Path):
        checkpoints = CheckpointSettings(Path(checkpoints))
    thread = _NodeThread(configuration, settings, checkpoints, open_network)
    bridge = thread.start()
    try:
        yield bridge
    except CollaborationEnded:
        thread.end()
        if thread.failure is None:
            raise
    except BaseException:
        thread.end()
        if thread.failure is not None:
            logger.error("the node had failed as well: %s", thread.failure)
        raise
    else:
        thread.end()
    if thread.failure is not None:
        raise thread.failure


@asynccontextmanager
async def open_training(
    node: Node, settings: CollaborationSettings, checkpoints: CheckpointSettings | None = None
) -> AsyncIterator[Collaboration]:
    """Take part in a run from a node that runs, until the block ends; once in a node's life.

    It begins when the node has come among the others: who trains before it has met them makes steps
    of its own, which nobody else has. NotInThisRun if the node's pass does not allow it, NotAllowed
    if the others do not, NobodyAnswers if none of the places to join at does. The bridge is for one
    training thread, which this does not wait for: `train_in_thread` does. `checkpoints`: this
    peer keeps the run's (node/checkpoint_keeper.py, with what it raises).
    """
    _check_pass(node, settings.run)
    async with AsyncExitStack() as stack:
        keeper = None
        if checkpoints is not None:
            keeper = await stack.enter_async_context(open_keeper(checkpoints, settings.run))
        await _meet_the_others(node)
        yield await stack.enter_async_context(
            open_collaboration(node.network, node.rpc, node.dht, settings, keeper=keeper)
        )


async def train_in_thread(
    node: Node,
    settings: CollaborationSettings,
    train: Callable[[Bridge], Result],
    checkpoints: CheckpointSettings | None = None,
    *,
    beside: Callable[[Collaboration], Awaitable[object]] = _nothing,
    wake: Callable[[], None] = _wakes_nothing,
) -> Result:
    """Run a training loop in a worker thread and take part in a run with it; what it returned.
    `beside` runs as long as the loop does, for whoever watches.

    Cancelling ends the collaboration first, which wakes the loop with CollaborationEnded wherever
    it waits for that, and then waits for the thread: no thread is ever left behind. A loop that
    waits for other things as well is woken by `wake`, which is called when the collaboration has
    ended, whatever ended it.
    """
    returned: list[Result] = []
    over, is_ending = trio.Event(), False

    async def run_thread(bridge: Bridge) -> None:
        try:
            returned.append(await trio.to_thread.run_sync(train, bridge))
        except CollaborationEnded:
            if not is_ending:  # else that is how the loop was told, and no failure of its own
                raise
        finally:
            over.set()

    with _unwrapped():
        async with (
            trio.open_nursery() as threads,
            _waking(wake),
            open_training(node, settings, checkpoints) as collaboration,
        ):
            threads.start_soon(run_thread, collaboration.bridge)
            try:
                async with trio.open_nursery() as watching:
                    watching.start_soon(beside, collaboration)
                    await over.wait()
                    watching.cancel_scope.cancel()
            except BaseException:
                is_ending = True
                raise
    return returned[0]


@asynccontextmanager
async def _waking(wake: Callable[[], None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        wake()


class _NodeThread:
    """A node and a collaboration on it, in a thread that lives as long as they do.

    `failure` is what ended it before it was told to end.
    """

    def __init__(
        self,
        configuration: Configuration,
        settings: CollaborationSettings,
        checkpoints: CheckpointSettings | None,
        open_network: OpenNetwork,
    ) -> None:
        self._configuration = configuration
        self._settings, self._checkpoints = settings, checkpoints
        self._open_network = open_network
        self._thread = threading.Thread(target=self._run, name="potluck node")
        self._begun = threading.Event()  # `_token` is there, or will never be
        self._ready = threading.Event()  # `_bridge` is there, or will never be
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._ending = trio.Event()
        self._bridge: Bridge | None = None
        self.failure: BaseException | None = None

    def start(self) -> Bridge:
        """Returns when the node takes part; raises what kept it from that."""
        self._thread.start()
        try:
            self._ready.wait()
        except BaseException:  # Ctrl-C meanwhile
            self.end()
            raise
        if self._bridge is None:
            self._thread.join()
            assert self.failure is not None
            raise self.failure
        return self._bridge

    def end(self) -> None:
        """End the node and wait until nothing of it is left. Twice is harmless."""
        self._begun.wait()
        if self._token is not None:
            with suppress(trio.RunFinishedError):  # it has ended by itself
                self._token.run_sync_soon(self._end)
        self._thread.join()

    def _end(self) -> None:
        """What takes part says that it leaves, which it could not while all around it is cancelled;
        what is still beginning is cancelled."""
        if self._bridge is None:
            self._scope.cancel()
        else:
            self._ending.set()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that trains
            self.failure = _only(error)
        finally:
            self._begun.set()
            self._ready.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._begun.set()
        with self._scope:
            async with (
                Node(self._configuration, open_network=self._open_network) as node,
                open_training(node, self._settings, self._checkpoints) as collaboration,
            ):
                for address in node.network.addresses():
                    logger.info("others can join through %s", address)
                self._bridge = collaboration.bridge
                self._ready.set()
                await self._ending.wait()


def _check_pass(node: Node, run: str) -> None:
    member = node.membership
    if member is None:
        return
    if member.run_name != run:
        raise NotInThisRun(
            f"This node is a member of {member.run_name}, not of {run}.",
            why="The pass in its home says so.",
            advice=f"Train in {member.run_name}, or take another home (POTLUCK_HOME) for {run}.",
        )
    if not member.may_train:
        raise NotInThisRun(
            f"This node may look on in {run}, and not train.",
            why="The roles in its pass do not allow more.",
            advice="Ask the run's moderators for the role of a volunteer.",
        )


async def _meet_the_others(node: Node) -> None:
    """Until the swarm is joined, if there is anybody to join."""
    state = node.dht.bootstrap_state()
    if state.joined is Joined.ALONE:
        return
    refusal: NotAllowed | None = None

    async def listen_for_a_refusal() -> None:
        nonlocal refusal
        refusal = await node.dht.turned_away()
        nursery.cancel_scope.cancel()

    seconds = MEETING_SECONDS if state.addresses else LOOKING_BACK_SECONDS
    with trio.move_on_after(seconds) as patience:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen_for_a_refusal)
            await node.dht.joined()
            nursery.cancel_scope.cancel()
    if refusal is not None:
        raise refusal
    if patience.cancelled_caught and state.addresses:
        raise NobodyAnswers(
            "Nobody of the run answers.",
            why=f"For {seconds:g} seconds it was tried to join: {node.dht.bootstrap_state()}.",
            advice="Check the addresses, and this machine's connection. Training alone would make "
            "steps that nobody else has.",
        )


@contextmanager
def _unwrapped() -> Iterator[None]:
    try:
        yield
    except BaseExceptionGroup as group:
        only = _only(group)
        if only is group:
            raise
        raise only from None


def _only(error: BaseException) -> BaseException:
    """The one error in a nursery's group, or the group if there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
