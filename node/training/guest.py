"""Runs a training loop with a node: from an ordinary script, or on a node that already runs.

    with collaborate(run="poem", batch=512, bootstrap=[...]) as bridge:    # a script of your own
        optimizer = CollaborativeOptimizer(model.named_parameters(), torch.optim.AdamW, bridge)
        ...                                                                # your loop as it was

    async with open_training(node, settings) as collaboration:             # on a running node
        ...
    await train_in_thread(node, settings, train)                           # the same, with the loop

`collaborate` runs a node, with its directory, averager and state, in a thread of its own. The node
ends with the block: after the last line, after an error, and after Ctrl-C, which reaches the main
thread as usual. A thread is enough: beside 50 MB/s a training loop keeps nine tenths of its speed
or more, if its steps take longer than some ten milliseconds (`scripts/bench interference`).

Promises: nothing of the node is left when the block has been left. If the node fails, all waiting
calls of the bridge raise, and the block raises the node's own error.

Two nodes cannot share a home. Scripts that run side by side on one machine need one each (`home=`,
or POTLUCK_HOME).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import trio

from node.core.configuration import Configuration, read_configuration
from node.core.directory import join_or_be_refused
from node.core.node import Node, OpenNetwork, open_real_network
from node.core.settings import Value
from node.run.checkpoint_keeper import CheckpointSettings, open_keeper
from protocols.accumulation.bridge import Bridge
from protocols.accumulation.collaboration import (
    Collaboration,
    CollaborationSettings,
    open_collaboration,
)
from protocols.accumulation.ended import CollaborationEnded
from protocols.dht import Joined
from protocols.errors import PotluckError, Unreachable
from protocols.moshpit.settings import MATCHMAKING_SECONDS
from protocols.tensors import CodecName

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


MEETING_SECONDS = 60.0
"""The timeout for the peers to join at. Usually they answer in a tenth of a second; a peer that has
just been started, or a machine on a bad link, needs some tries."""

LOOKING_BACK_SECONDS = 10.0
"""The same if all known peers are from an earlier session, and may be gone."""


class NotInThisRun(PotluckError):
    """The pass in this node's home is for another run, or not for training."""


class NobodyAnswers(Unreachable):
    """There are peers to join at, and none of them answers."""


async def _nothing(_collaboration: Collaboration) -> None:
    """Nothing to do beside the loop."""


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
      use the same values.
    - `bootstrap`: addresses of peers to join through; none for the first peer, and none for a
      member, whose pass names them.
    - `listen`: where others can dial this node; by default any free port of every interface.
    - `home`: where the node keeps its key, its pass and its data (POTLUCK_HOME, or the platform's
      default).
    - `client`: nobody can dial this node, so it keeps and reduces nothing for others.
    - `codec`: how averaged values travel, for all or by the parameters' names.
    - `grace_seconds`: how long a round waits for expected peers that are not there yet.
    - `checkpoints`: a folder (or CheckpointSettings) in which this peer keeps the run's: the
      optimizer begins from the newest one, and others are written while it trains.
    - `begins`: False in volunteers' scripts if another peer keeps checkpoints. They then never
      begin the run anew, but wait for that peer, or for others who train.
    - `open_network`: the node's network, for labs that limit it or break it.

    Anything not given here comes from the node's settings (environment, then file), as for any
    command. An error that keeps the node from starting is raised before the block begins.
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
    """Take part in a run from a running node, until the block ends; once in a node's life.

    The block begins when the node has reached other peers: a peer that trains before that makes
    steps of its own, which nobody else has. NotInThisRun if the node's pass does not allow it,
    NotAllowed if the others do not, NobodyAnswers if no peer to join at answers. The bridge is for
    one training thread. This does not wait for that thread; `train_in_thread` does. `checkpoints`:
    this peer keeps the run's (node/run/checkpoint_keeper.py, with its errors).
    """
    _check_pass(node, settings.run)
    settings = replace(settings, client=node.dials_out_only, router=lambda: node.connectivity.nat)
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
    """Take part in a run with a training loop in a worker thread; returns the loop's result.
    `beside` runs as long as the loop, for example to watch it.

    Cancelling first ends the collaboration, which wakes the loop with CollaborationEnded wherever
    it waits for that, and then waits for the thread: no thread is ever left behind. If the loop
    waits for other things as well, `wake` has to wake it; it is called when the collaboration has
    ended for whatever reason.
    """
    returned: list[Result] = []
    over, is_ending = trio.Event(), False

    async def run_thread(bridge: Bridge) -> None:
        try:
            returned.append(await trio.to_thread.run_sync(train, bridge))
        except CollaborationEnded:
            if not is_ending:  # else the loop was told to end this way, and has not failed
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

    `failure` is the error that ended it before it was told to end.
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
        self._begun = threading.Event()  # set when `_token` is there, or never will be
        self._ready = threading.Event()  # set when `_bridge` is there, or never will be
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._ending = trio.Event()
        self._bridge: Bridge | None = None
        self.failure: BaseException | None = None

    def start(self) -> Bridge:
        """Returns when the node takes part; raises the error that prevented it."""
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
        """End the node and wait until nothing of it is left. May be called twice."""
        self._begun.wait()
        if self._token is not None:
            with suppress(trio.RunFinishedError):  # it has ended by itself
                self._token.run_sync_soon(self._end)
        self._thread.join()

    def _end(self) -> None:
        """Let the collaboration tell the others that it leaves, which needs the node uncancelled.
        If it has not begun, cancel it."""
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
            advice=f"Train in {member.run_name}, or use another home (POTLUCK_HOME) for {run}.",
        )
    if not member.may_train:
        raise NotInThisRun(
            f"This node may read in {run}, but not train.",
            why="The roles in its pass do not allow more.",
            advice="Ask the run's moderators for the role of a volunteer.",
        )


async def _meet_the_others(node: Node) -> None:
    """Wait until the swarm is joined, if there is anybody to join."""
    state = node.dht.bootstrap_state()
    if state.joined is Joined.ALONE:
        return
    seconds = MEETING_SECONDS if state.addresses else LOOKING_BACK_SECONDS
    with trio.move_on_after(seconds) as patience:
        await join_or_be_refused(node.dht, node.membership)
    if patience.cancelled_caught and node.dht.refusal is not None:
        raise node.dht.refusal
    if patience.cancelled_caught and state.addresses:
        raise NobodyAnswers(
            "Nobody of the run answers.",
            why=f"This node tried to join for {seconds:g} seconds: {node.dht.bootstrap_state()}.",
            advice="Check the addresses, and this machine's connection. This node does not train "
            "alone, because nobody else would have its steps.",
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
