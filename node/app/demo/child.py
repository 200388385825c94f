"""One command of the demo in a process of its own: `python -m node.app.demo.child PARENT
ARGUMENTS…`.

It is `potluck ARGUMENTS…`, and cannot outlive the demo: on Linux the kernel kills it when its
parent dies, however that happens. Elsewhere the demo ends it, unless the demo itself is killed.

The parent may have died before the kernel was asked, so that is checked afterwards.
"""

from __future__ import annotations

import os
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_SIGKILL = 9


def die_with(parent: int) -> None:
    """End this process when `parent`, or its thread that started us, ends."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, _SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from node.app.main import main

    del sys.argv[1]
    sys.exit(main())
