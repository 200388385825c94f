"""`potluck experts list`: who serves which experts of a run.

The node that takes part in this home is asked. If there is none, the command joins the swarm for a
moment, as `potluck dht --bootstrap` does, and reads the run's definition and directory itself.
"""

from __future__ import annotations

import argparse
import os
import string
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from node.app.cli.exit_codes import DONE
from node.app.cli.output import Output, columns_of, counted, printable
from node.core.duration import span
from node.training.census import EXPERTS_LIST, CensusServer, CountedGrid, ExpertCensus
from protocols.errors import PotluckError

if TYPE_CHECKING:
    from node.core.configuration import Configuration
    from node.run.invite import RunInvite

WIDE: Final = 100  # columns of a picture where there is no terminal
TALLEST: Final = 32  # rows of a picture; beyond, several cells share a character
MARKS: Final = string.ascii_lowercase + string.ascii_uppercase
OTHER_MARK: Final = "#"  # of servers beyond those
NOBODY: Final = "·"
SHADES: Final = "·░▒▓█"
LINE_OF_A_LONG_GRID: Final = 64


class NoExpertsHere(PotluckError):
    """The run has no experts, or the node does not take part in a run that has some."""


def show_list(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for

    output = Output.of(arguments)
    configuration = configuration_for(arguments)
    census = _from_here(arguments, configuration)
    if census is None:
        census = _from_the_run(arguments, configuration, output)
    columns = columns_of(sys.stdout) or WIDE
    text = "\n".join(census_lines(census, columns, time.time()))
    output.data(msgspec.to_builtins(census), text)
    return DONE


def _from_here(arguments: argparse.Namespace, configuration: Configuration) -> ExpertCensus | None:
    """What the node in this home says; None if there is none."""
    from node.core.control_client import ControlFailure, NoRunningNode, ask_once
    from node.core.wrong_use import WrongUse

    try:
        answer = ask_once(
            configuration.places.control_socket, EXPERTS_LIST, silence_seconds=arguments.timeout
        )
    except NoRunningNode:
        return None
    except ControlFailure as error:
        if "does not know the command" not in error.what:
            raise
        raise NoExpertsHere(
            "The node that runs here takes part in no run with experts.",
            why="It does not train, its run has no experts, or it has not got the run's "
            "definition yet.",
            advice="`potluck status` shows its state. For another run use another home: --home "
            "DIRECTORY.",
        ) from None
    census = msgspec.convert(answer, ExpertCensus)
    if arguments.invite or arguments.invite_file:
        invite = _invited(arguments, configuration)
        if invite.run != census.run:
            raise WrongUse(
                f"The node that runs here is in {census.run}, not in {invite.run}.",
                advice="For another run use another home: --home DIRECTORY.",
            )
    return census


def _invited(arguments: argparse.Namespace, configuration: Configuration) -> RunInvite:
    from node.app.commands.join import typed_invite
    from node.training.join import read_invited

    return read_invited(
        configuration.places, typed_invite(arguments), arguments.invite_file, os.environ
    )


def _from_the_run(
    arguments: argparse.Namespace, configuration: Configuration, output: Output
) -> ExpertCensus:
    from node.app.cli.interruption import run_until_signal
    from node.app.cli.log_output import log_to_stderr
    from node.app.commands.join import with_places
    from node.app.swarm_client import open_client

    invite = _invited(arguments, configuration)
    configuration = with_places(configuration, invite)
    log_to_stderr(debug=output.debug)
    found: list[ExpertCensus] = []

    async def main() -> int:
        import trio

        from node.run.experts import directory_name, grids
        from node.training.census import take_census
        from node.training.join import find_definition
        from protocols.errors import DeadlineExceeded
        from protocols.experts import ExpertDirectory

        with trio.move_on_after(arguments.timeout) as patience:
            async with open_client(configuration, arguments.timeout) as client:
                signed = await find_definition(
                    client.network, client.rpc, configuration, invite.run, invite.organiser
                )
                if signed.definition.experts is None:
                    raise NoExpertsHere(
                        f"{invite.run} has no experts.",
                        why="Its definition has no [experts], so each of its peers has the whole "
                        "model.",
                    )
                name = directory_name(signed.definition)
                directory = ExpertDirectory(client.network, client.dht, name)
                found.append(await take_census(directory, invite.run, grids(signed.definition)))
        if patience.cancelled_caught:
            raise DeadlineExceeded(
                f"The experts of {invite.run} could not be read in {arguments.timeout:g} seconds.",
                why="The peers of the run answer slowly, or not at all.",
                advice="Try again with a longer --timeout.",
            )
        return DONE

    code = run_until_signal(main)
    if not found:  # a signal came
        raise SystemExit(code)
    return found[0]


# ---- for a person; pure


def census_lines(census: ExpertCensus, columns: int, now: float) -> Iterator[str]:
    live, cells = (sum(getattr(grid, what) for grid in census.grids) for what in ("live", "cells"))
    if not census.servers:
        yield f"{census.run}: nobody serves any of its {cells:,} cells now."
        yield "`potluck experts serve` serves some; `potluck join` serves and trains."
        return
    at = f"at {counted(len(census.servers), 'server')}"
    yield f"{census.run}: {live:,} of {cells:,} cells have a live expert, {at}"
    marks = {server.peer: mark for server, mark in zip(census.servers, MARKS, strict=False)}
    by_uid = {
        uid: marks.get(server.peer, OTHER_MARK)
        for server in reversed(census.servers)
        for uid in server.experts
    }
    for grid in census.grids:
        yield ""
        sizes = " x ".join(map(str, grid.sizes))
        yield f"{grid.name}, {sizes}: {grid.live:,} of {grid.cells:,}"
        for row in picture_of(grid, by_uid, columns - 2):
            yield f"  {row}"
    yield ""
    for server in census.servers:
        yield _server(server, marks.get(server.peer, OTHER_MARK), now)
    if census.own:
        yield ""
        yield from _own(census)


def picture_of(grid: CountedGrid, marks: Mapping[str, str], columns: int) -> list[str]:
    """The grid with the first index downwards and the others to the right: for each cell the mark
    of its server. If it is too large for that, each character stands for several cells, and is
    the darker the more of them are live."""
    first, rest = grid.sizes[0], grid.cells // grid.sizes[0]
    if len(grid.sizes) == 1:
        rest = min(first, LINE_OF_A_LONG_GRID, max(columns, 1))
        first = -(-grid.cells // rest)
    found = [marks.get(_uid(grid, number), "") for number in range(grid.cells)]
    down, right = -(-first // TALLEST), -(-rest // max(columns, 1))
    lines = []
    for top in range(0, first, down):
        line = ""
        for left in range(0, rest, right):
            there = [
                found[row * rest + column]
                for row in range(top, min(top + down, first))
                for column in range(left, min(left + right, rest))
                if row * rest + column < grid.cells
            ]
            if down == right == 1:
                line += there[0] or NOBODY if there else " "
            else:
                line += _shade(sum(map(bool, there)), len(there))
        lines.append(line.rstrip())
    return lines


def _shade(live: int, cells: int) -> str:
    """Only an empty block is empty, and only a full one is full."""
    if not cells:
        return " "
    if live in (0, cells):
        return SHADES[-1] if live else SHADES[0]
    return SHADES[1 + min(2, 3 * live // cells)]


def _uid(grid: CountedGrid, number: int) -> str:
    """The uid of the cell with this number, as the directory writes it."""
    indices: list[str] = []
    for size in reversed(grid.sizes):
        number, index = divmod(number, size)
        indices.append(str(index))
    return ".".join((grid.name, *reversed(indices)))


def _server(server: CensusServer, mark: str, now: float) -> str:
    age = f", the same for {span(max(0.0, now - server.since))}" if server.since else ""
    load = f"{server.load_seconds:.1f} s of work waiting"
    return printable(
        f"{mark}  {server.peer}: {counted(len(server.experts), 'expert')}, {load}{age}"
    )


def _own(census: ExpertCensus) -> Iterator[str]:
    yield "here:"
    width = max(len(one.uid) for one in census.own)
    for one in census.own:
        saved = "not saved yet"
        if one.saved_seconds_ago is not None:
            saved = f"saved {span(one.saved_seconds_ago)} ago"
        steps = counted(one.steps, "step")
        yield f"  {one.uid:<{width}}  {one.came}, {steps}, {counted(one.rows, 'row')}, {saved}"
