"""The command `potluck`: find the command, run it, and end in one of a few documented ways.

Promises to the shell: results on stdout, other text on stderr; an exit code from the table in
`node/app/cli/exit_codes.py`; no traceback unless `--debug` or POTLUCK_DEBUG asks for one; and
Ctrl-C or SIGTERM at any moment ends the process quietly, with its files cleaned up.

Every command imports this module, node/app/cli/catalogue.py and what they import, and the help
imports all of `node/app/commands/*`, so none of these may import trio, rich, msgspec or libp2p at
the top: `potluck version` has 0.3 s in all. Each command imports what it needs inside its `run`.
Even argparse is imported only after the signal handlers are set, so that an early Ctrl-C finds
them.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from node.core.collector import collect_seldom, freeze_objects
from node.core.stopping_signals import stopping_signals

TYPE_CHECKING = False  # `typing` itself would cost 5 ms of every command
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from node.app.cli.output import Output

    Run = Callable[[argparse.Namespace], int]
    Parse = Callable[[Sequence[str]], tuple[Run, argparse.Namespace]]


class Stopped(BaseException):
    """A signal asked this process to end while ordinary (not trio) code was running."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number


class _SignalMemory:
    """Raises `Stopped` in the running code, and remembers that it did.

    It has to remember because libraries with a bare `except` swallow the exception. While modules
    are imported the process ends at once instead. No command has begun anything by then, and an
    exception there turns into an ImportError in some extension modules, and, while msgspec
    inspects a new type, into a segmentation fault (0.22, about one signal in a hundred).
    """

    def __init__(self) -> None:
        self.first: int | None = None

    def __call__(self, signal_number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = signal_number
        if _is_importing(frame):
            os._exit(128 + signal_number)
        raise Stopped(signal_number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def main(argv: Sequence[str] | None = None, parse: Parse | None = None) -> int:
    """Run one command line and return its exit code. The entry point of the console script.

    `parse` finds the function that runs it, and its arguments: those of `potluck`, or of another
    program with the same habits.
    """
    if argv is None:  # a process of its own
        collect_seldom()
    try:
        code = _run_with_signals(argv, parse)
    finally:
        freeze_objects()
    if sys.platform != "win32" and signal.getitimer(signal.ITIMER_REAL)[0] > 0:
        # A signal ended the command and its alarm is still set (node/app/cli/interruption.py).
        # The interpreter's own end takes the alarm's handler away first, so that on a busy machine
        # the alarm would kill us there, with its own exit code. Skip that end.
        try:
            sys.stdout.flush()
        finally:  # a reader that has gone does not matter after a signal
            os._exit(code)
    return code


def _run_with_signals(argv: Sequence[str] | None, parse: Parse | None) -> int:
    memory = _SignalMemory()
    try:
        for number in stopping_signals():
            signal.signal(number, memory)
        return _run(list(sys.argv[1:] if argv is None else argv), parse)
    except BaseException:
        if memory.first is None:
            raise
        return 128 + memory.first
    finally:
        # Only the interpreter's own shutdown is left: let a further Ctrl-C end it silently.
        for number in stopping_signals():
            signal.signal(number, signal.SIG_DFL)


def _run(argv: list[str], parse: Parse | None) -> int:
    from node.app.cli import exit_codes
    from node.app.cli.output import Output, discard_output, prepare_streams

    prepare_streams()
    output = Output.for_command_line(argv)
    code = exit_codes.DONE
    try:
        code = _run_command(argv, output, parse)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has left (`potluck … | head`). That is its right.
        discard_output()
        return exit_codes.BROKEN_PIPE
    except OSError as error:  # the disk that stdout goes to is full
        discard_output()
        if code == exit_codes.DONE:
            output.say(f"error: The output could not be written: {error.strerror or error}.")
            return exit_codes.FAILED
    return code


def _run_command(argv: list[str], output: Output, parse: Parse | None) -> int:
    try:
        if parse is None:
            from node.app.cli import catalogue

            parse = catalogue.parse
        run, arguments = parse(argv)
        return run(arguments)
    except SystemExit as exit_request:  # argparse, after it has printed the help
        return int(exit_request.code or 0)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the last place: every error becomes an exit code
        if isinstance(error, ExceptionGroup) and error.split(BrokenPipeError)[1] is None:
            raise BrokenPipeError from None  # wrapped by the nurseries of a loop
        from node.core.failure import failure_of

        failure = failure_of(error)
        output.failure(failure)
        if output.debug:
            import traceback

            traceback.print_exception(error, file=sys.stderr)
        return failure.exit_code


if __name__ == "__main__":  # `python -m node.app.main`; `python -m node` is the documented way
    from node.app.main import main as entry  # this module again, under the name that others import

    sys.exit(entry())
