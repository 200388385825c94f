"""A backbone's page with a long history, in a process that takes orders (orders.py).

The run goes on while it is served: a step every few seconds, as in the hours before. What the page
costs is all that this process costs; a real backbone makes the history beside its other work.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import trio

from lab.bench.orders import obey_with_nursery
from lab.page.scenes import PageScene, served
from node.app.page import RunPage
from node.core.status import memory_in_use

if TYPE_CHECKING:
    from trio_typing import TaskStatus

STEP_SECONDS = 2.5  # of the scene: from 2 to 3


class PageServer:
    """The orders of this process: each public coroutine is one."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._page: RunPage | None = None

    async def serve(self, peers: int, hours: float) -> dict[str, Any]:
        """Make the history, and serve it from now on."""
        scene = PageScene(peers=peers, steps=round(hours * 3600 / STEP_SECONDS))
        self._page = page = RunPage(scene.source())
        url = await self._nursery.start(_serve, page)
        self._nursery.start_soon(_go_on, scene)
        return {"url": url, "points": len(scene.history.curve.points)}

    async def used(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {
            "at": time.monotonic(),
            "cpu_seconds": time.process_time(),
            "memory_bytes": memory_in_use() or 0,
            "viewers": 0 if self._page is None else self._page.viewers,
        }


async def _serve(page: RunPage, task_status: TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
    async with served(page) as url:
        task_status.started(url)
        await trio.sleep_forever()


async def _go_on(scene: PageScene) -> None:
    """Steps, and looks at the peers, forever."""
    epoch = scene.steps
    while True:
        await trio.sleep(STEP_SECONDS)
        scene.now += STEP_SECONDS
        scene.step(epoch)
        scene.history.look(scene.others)
        epoch += 1


if __name__ == "__main__":
    trio.run(obey_with_nursery, PageServer)
