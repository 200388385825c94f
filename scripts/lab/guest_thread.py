"""A training thread beside trio, for as long as a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from protocols.errors import PotluckError
from protocols.guest import Portal, open_portal

Value = TypeVar("Value")


async def in_guest_thread(
    guest: Callable[[Portal], Value], ended: PotluckError | None = None
) -> Value:
    """Call this function in a thread, with a portal that is open meanwhile. Cancelling ends the
    portal with the error `ended`, and waits for the thread."""
    values, errors, over = list[Value](), list[Exception](), trio.Event()

    async def run(portal: Portal) -> None:
        try:
            values.append(await trio.to_thread.run_sync(guest, portal))
        except Exception as error:  # noqa: BLE001 - raised below, where no nursery wraps it
            errors.append(error)
        finally:
            over.set()

    async with (
        trio.open_nursery() as threads,
        open_portal(ended or PotluckError("The laboratory has ended.")) as portal,
    ):
        threads.start_soon(run, portal)
        await over.wait()
    if errors:
        raise errors[0]
    return values[0]
