"""`potluck doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from node.app.cli.exit_codes import DONE, FAILED
from node.app.cli.output import Output

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from node.app.cli.parser import Subparsers
    from node.core.configuration import Configuration


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_setting_flag

    parser = subparsers.add_parser(
        "doctor",
        help="find out what is wrong with this machine, and what to do",
        description="Examine this machine and this home, and say for each thing that is wrong what "
        "to do about it: the running node, the settings, the modes of files, disk, memory, GPU and "
        "driver, the build of torch, DNS, IPv6, the MTU, the ports, whether the run's peers accept "
        "connections, the pass, the auth server, and the clock. It takes a few seconds and changes "
        "nothing. It asks only the addresses that a node of this home would ask. Exit code 1 if "
        "something is wrong; warnings alone are no failure.\n\n"
        "--bundle writes a report for a bug report, a ZIP file that only you can read: the "
        "findings, the versions, the settings, the state of the running node and the last lines of "
        "its log. It has no key, pass, token, invite, code, e-mail address or name of a person. "
        "Your home directory is ~, your user name and this machine's name are left out, and of "
        "public IP addresses only the beginning is there. Peer ids, private addresses and the "
        "names of the run's servers stay. Look into it before you send it.",
        example="potluck doctor\npotluck doctor --json\npotluck doctor --bundle report.zip",
    )
    parser.add_argument(
        "--bundle",
        metavar="FILE",
        nargs="?",
        const="",
        help="write a report without secrets to this new file "
        "(potluck-report-TIME.zip in this folder)",
    )
    for key in ("network.listen", "dht.bootstrap", "identity.key_file"):
        add_setting_flag(parser, key)


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.app.cli.interruption import run_until_signal
    from node.app.cli.log_output import log_to_stderr
    from node.app.doctor import loading_torch

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    log_to_stderr(debug=output.debug)
    with loading_torch() as loading:
        return run_until_signal(lambda: _examine(configuration, loading, arguments.bundle, output))


async def _examine(
    configuration: Configuration,
    loading: subprocess.Popen[bytes],
    bundle: str | None,
    output: Output,
) -> int:
    import trio

    from node.app.doctor import (
        CHECKS,
        FindingLevel,
        examine,
        look_around,
        new_report_file,
        show_findings,
        write_report,
    )
    from node.net import VERSION

    written: Path | None = None
    if bundle is not None:
        written = new_report_file(bundle)  # before the work: the place may be wrong
    surroundings = await trio.to_thread.run_sync(look_around, configuration, loading)
    findings = await examine(surroundings, CHECKS)
    is_ok = not any(finding.level is FindingLevel.ERROR for finding in findings)
    value = {
        "ok": is_ok,
        "version": VERSION,
        "findings": [finding.as_mapping() for finding in findings],
    }
    if written is not None:
        await trio.to_thread.run_sync(write_report, written, value, surroundings)
        value["bundle"] = str(written)
    if output.json:
        output.data(value, "")
    else:
        show_findings(findings)
    if written is not None:
        output.say(f"The report is in {written}. Look into it before you send it.")
    return DONE if is_ok else FAILED
