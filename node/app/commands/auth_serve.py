"""`potluck auth serve`: the auth server in the foreground. Ctrl-C or SIGTERM ends it."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.auth_service import AuthService
    from node.app.cli.parser import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="run the auth server",
        description="Run the auth server that `potluck auth init` has made here, in the "
        "foreground. It lets volunteers in over HTTPS, and answers moderators' commands on this "
        "machine. It reads the certificate again when its files change. Ctrl-C ends it (exit code "
        "130), and so does SIGTERM (exit code 0, as systemd expects).",
        example="potluck auth serve\n"
        "potluck auth serve --listen '[::]:443' --listen 0.0.0.0:443\n"
        "potluck auth serve --insecure-http --listen 127.0.0.1:8080",
    )
    parser.add_argument(
        "--listen",
        action="append",
        metavar="HOST:PORT",
        help="an address to listen on, instead of server.listen in auth.toml; may be given several "
        "times",
    )
    parser.add_argument(
        "--insecure-http",
        action="store_true",
        help="plain HTTP, on an address of this machine only: for a trial, or behind a proxy on "
        "this machine that does the TLS",
    )
    parser.add_argument(
        "--settings", metavar="FILE", help="read settings from this file instead of auth.toml"
    )


def run(arguments: argparse.Namespace) -> int:
    import os

    from node.app.auth_places import find_auth_places
    from node.app.auth_service import AuthService
    from node.app.cli.exit_codes import DONE
    from node.app.cli.interruption import run_until_signal
    from node.app.cli.log_output import log_to_stderr
    from node.core.descriptor_limit import raise_descriptor_limit

    output = Output.of(arguments)
    log_to_stderr(debug=output.debug)
    raise_descriptor_limit()
    places = find_auth_places(
        os.environ, home=getattr(arguments, "home", None), settings_file=arguments.settings
    )
    service = AuthService(
        places, listen=tuple(arguments.listen or ()), insecure_http=arguments.insecure_http
    )
    _prepare_for_serving()
    return run_until_signal(lambda: _serve(service, output), terminated=DONE)


async def _serve(service: AuthService, output: Output) -> int:
    import trio

    from node.app.cli.interruption import at_hard_exit
    from node.core.control import remove_socket

    with at_hard_exit(partial(remove_socket, service.places.socket)):
        async with trio.open_nursery() as nursery:
            status = await nursery.start(service.serve)
            _introduce(status, output)
    return 0


def _introduce(status: dict[str, Any], output: Output) -> None:
    started = {"event": "serving", **status}
    lines = [
        f"The auth server of {status['run']} is at {status['url']}",
        f"  listening   {', '.join(status['listening'])}",
        f"  key         {status['fingerprint']}",
    ]
    output.data(started, "\n".join(lines))
    if status["certificate_until_ms"] is None:
        output.say("Plain HTTP: it answers this machine only.")
    if not output.json:
        output.say("`potluck auth invite` prints an invite. Ctrl-C ends the server.")


def _prepare_for_serving() -> None:
    """Settings of this process, which does nothing else."""
    import sys

    # The thread that writes the database takes the interpreter back several times in each
    # transaction. While the event loop is busy it would wait 5 ms each time.
    sys.setswitchinterval(0.0005)
