"""How long a process took to end, less what other processes on the machine made it wait.

The promise of every command is two seconds from the signal to the prompt, on a machine that has
a processor to spare. A test machine may have none: then the kernel says for how long the process
was ready to run and was not let (the run delay of its main thread, Documentation/scheduler of
Linux, sched-stats), and that is not its fault. Everything else counts, sleeping above all. Where
the kernel does not say, nothing is taken off.

Easy to get wrong: the number is gone with the process. So its end is awaited without collecting
it (WNOWAIT), and the code that started it collects it afterwards.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

# The promise of every command.
LEAVE_SECONDS: Final = 2.0


class Leaving:
    """Started at the moment of the signal, for a child that this process has not yet awaited."""

    def __init__(self, process_id: int) -> None:
        self._process_id = process_id
        self._began = time.monotonic()
        self._waited_before = waited_for_a_processor_seconds(process_id)

    def wait(self) -> float:
        """Wait for its end, which stays to be collected; the seconds that were its own doing."""
        os.waitid(os.P_PID, self._process_id, os.WEXITED | os.WNOWAIT)
        seconds = time.monotonic() - self._began
        return seconds - waited_for_a_processor_seconds(self._process_id) + self._waited_before


def waited_for_a_processor_seconds(process_id: int) -> float:
    """For how long a process, so far, was ready to run while others ran; 0.0 if nobody knows."""
    try:
        statistics = Path(f"/proc/{process_id}/schedstat").read_text().split()
    except OSError:
        return 0.0
    return int(statistics[1]) / 1e9
