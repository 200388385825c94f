"""A node that serves the experts of a run, in a simulated world, until it is stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trio

from node.run.definition import RunDefinition
from node.run.experts import directory_name, grids, maker
from protocols.experts import ExpertDirectory, ExpertHost, HostSettings, open_expert_host
from protocols.testing.world import SimulatedWorld
from tests.access.members import running_node, write_key
from tests.homes import home_in
from tests.waiting import PATIENCE_SECONDS, until


@dataclass
class ExpertServer:
    """`address`: where others join. `stop()` ends it without a word to the trainers."""

    address: str
    host: ExpertHost
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def stop(self) -> None:
        self.scope.cancel()


@asynccontextmanager
async def expert_server(
    world: SimulatedWorld, definition: RunDefinition, name: str, folder: Path, *bootstrap: str
) -> AsyncIterator[ExpertServer]:
    """It hosts every expert of every grid."""
    configuration = home_in(folder / name, POTLUCK_DHT_BOOTSTRAP=",".join(bootstrap))
    write_key(configuration.key_file, world.identity_of(name))
    found = grids(definition)
    cells = sum(grid.cells for grid in found)

    async def serve(task_status: trio.TaskStatus[ExpertServer]) -> None:
        scope = trio.CancelScope()
        with scope:
            async with (
                running_node(world, name, configuration) as node,
                open_expert_host(
                    node.rpc,
                    ExpertDirectory(node.network, node.dht, directory_name(definition)),
                    found,
                    maker(definition),
                    folder / "experts",
                    HostSettings(most_experts=cells),
                ) as host,
            ):
                task_status.started(ExpertServer(node.network.addresses()[0], host, scope))
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        server: ExpertServer = await nursery.start(serve)
        await until(lambda: len(server.host.hosted()) == cells, PATIENCE_SECONDS)
        yield server
        server.stop()
