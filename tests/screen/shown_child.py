"""A process that shows a screen until it is stopped, or until a bug ends it."""

from __future__ import annotations

import sys

import trio

from lab.scenes import TRAINING
from node.app.cli.exit_codes import DONE
from node.app.cli.interruption import run_until_signal
from node.app.cli.output import Output
from node.app.screen import display_for, show_to_the_end

FRAME_SECONDS = 1.0  # enough for a frame; what a bug interrupts does not matter


def main(ending: str) -> int:
    with display_for(Output()) as display:

        async def work() -> None:
            display.shown.show(TRAINING)
            if ending == "bug":
                await trio.sleep(FRAME_SECONDS)
                raise RuntimeError("a bug")
            await trio.sleep_forever()

        async def show() -> int:
            return await show_to_the_end(display, work, lambda _failure: None, lambda: False)

        return run_until_signal(show, terminated=DONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
