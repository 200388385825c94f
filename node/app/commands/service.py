"""`potluck service`: have systemd run this home's `potluck join`, or `potluck experts
serve`, in the background.

A unit has an environment of its own. Of this shell's variables it gets only those for the home and
the settings file, and never a secret.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from node.app.cli.output import Output

if TYPE_CHECKING:
    from node.app.cli.parser import Subparsers
    from node.app.systemd import ServiceUnit
    from node.core.configuration import Configuration

PLACES = ("POTLUCK_HOME", "POTLUCK_CONFIG")  # copied into the unit with their present values
JOIN = ("join",)
SERVED = ("join", "experts serve")  # what a unit may run
LINGER = "It runs while you are logged in; with `loginctl enable-linger` it runs always."


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "service",
        help="train, or serve experts, in the background, from login or boot",
        description="Let systemd run `potluck join` for you, or `potluck experts serve`, in the "
        "last run. It starts it again when it fails, and tells it to leave when you log out or "
        "shut down. Limits and other settings come from the settings file (`potluck config show "
        "--origin`).",
        example="potluck service install\npotluck service install experts serve\n"
        "potluck service uninstall",
    )
    actions = parser.add_actions("action")
    install = actions.add_parser(
        "install",
        help="write a user unit for systemd, and start it",
        description="Write a unit for your own systemd (~/.config/systemd/user) that starts with "
        "your session, and start it now unless a node runs in this home. It is safe to repeat: an "
        "earlier unit is replaced. The unit contains no secret: join the run once by hand first, "
        "so that there is a key and, in a closed run, a pass. With COMMAND it runs that, with its "
        "flags: `join` or `experts serve`, without an invite. Flags of `service install` stand "
        "before it.\n\n"
        "systemd does not start it again after exit code 2 (wrong use) or 3 (not allowed, too "
        "large), and gives it ten seconds to leave. `potluck status`, `pause`, `leave` and `logs` "
        "work as usual; `journalctl --user -u potluck` shows its output.",
        example="potluck service install\npotluck service install --show\n"
        "potluck service install experts serve --experts 32\n"
        "potluck service install --home ~/poem --name potluck-poem",
    )
    install.add_argument(
        "--show", action="store_true", help="print the unit, without writing or starting anything"
    )
    install.add_argument(
        "--no-start", action="store_true", help="start it with your next session, not now"
    )
    install.add_argument(
        "words",
        metavar="COMMAND",
        nargs=argparse.REMAINDER,
        help="the command that it runs, with its flags (join)",
    )
    uninstall = actions.add_parser(
        "uninstall",
        help="stop the unit, and remove it",
        description="Make the node leave, and remove the unit. The home stays as it is.",
        example="potluck service uninstall",
    )
    for action in (install, uninstall):
        action.add_argument(
            "--name", metavar="NAME", help="the unit's name (potluck, or after the home's folder)"
        )


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "install":
        return _install(arguments, Output.of(arguments))
    return _uninstall(arguments, Output.of(arguments))


def _install(arguments: argparse.Namespace, output: Output) -> int:
    from node.app.cli.configured import configuration_for
    from node.app.systemd import ask_manager, lingers, require_systemd, unit_folder

    configuration = configuration_for(arguments)
    unit = _unit(arguments, configuration)
    file = unit_folder(os.environ) / f"{unit.name}.service"
    if arguments.show:
        output.data({"unit": unit.name, "file": str(file), "text": unit.text()}, unit.text())
        return 0
    require_systemd()
    _refuse_another_home(file, unit)
    _tell_what_is_left_out(output)
    runs = _runs_here(configuration)
    starts = not (arguments.no_start or runs)
    with _as_before_if_it_fails(file):
        _write(file, unit.text())
        ask_manager("daemon-reload")
        ask_manager("enable", f"{unit.name}.service")
        if starts:
            ask_manager("start", f"{unit.name}.service")
    said = [f"{file} is written; it starts with your session{', and now' if starts else ''}."]
    if runs:
        said.append("A node is running in this home, so it was not started now.")
    if not lingers():
        said.append(LINGER)
    said.append(
        f"`potluck status` shows its state; `journalctl --user -u {unit.name}` shows its output."
    )
    value = {"unit": unit.name, "file": str(file), "started": starts, "lingers": lingers()}
    output.data(value, "\n".join(said))
    return 0


def _uninstall(arguments: argparse.Namespace, output: Output) -> int:
    from node.app.systemd import (
        ask_manager,
        environment_lines,
        require_systemd,
        unit_folder,
        unit_name,
    )
    from node.core.wrong_use import WrongUse

    require_systemd()
    home = _chosen_home(arguments)
    name = unit_name(arguments.name, home)
    file = unit_folder(os.environ) / f"{name}.service"
    if not file.exists():
        raise WrongUse(
            f"There is no unit {file}.",
            why="It was not installed, or has another name.",
            advice="`potluck service uninstall --name NAME`, or with the --home of `install`.",
        )
    text = _own_text(file)
    own = "" if home is None else environment_lines({"POTLUCK_HOME": home})
    if arguments.name is None and _home_lines(text) != _home_lines(own):
        raise WrongUse(
            f"{file} belongs to another home.",
            why="Two homes may have folders of the same name.",
            advice=f"`potluck service uninstall --name {name}` removes it all the same.",
        )
    ask_manager("disable", "--now", f"{name}.service")
    file.unlink(missing_ok=True)
    ask_manager("daemon-reload")
    output.data({"unit": name, "file": str(file), "removed": True}, f"{file} is removed.")
    return 0


def _unit(arguments: argparse.Namespace, configuration: Configuration) -> ServiceUnit:
    """WrongUse if this home cannot continue a run without an invite."""
    from node.app.systemd import ServiceUnit, this_program, unit_name
    from node.core.wrong_use import WrongUse
    from node.training.join import Need, pass_needed, read_invited

    words = tuple(arguments.words) or JOIN
    serves = _check_command(words)
    invite = read_invited(configuration.places, None, None, {})
    if not configuration.key_file.exists() or pass_needed(configuration, invite, "") not in (
        Need.NOTHING,
        Need.RENEWAL,
    ):
        raise WrongUse(
            f"This node has no key or pass for {invite.run}, and a service cannot ask for one.",
            advice=f"Run `potluck {'experts serve' if serves else 'join'}` (or `potluck login`) "
            "once by hand, then try again.",
        )
    home, variables = _chosen_home(arguments), {}
    if home is not None:
        variables["POTLUCK_HOME"] = home
    config = getattr(arguments, "config", None) or os.environ.get("POTLUCK_CONFIG")
    if config:
        variables["POTLUCK_CONFIG"] = str(Path(config).expanduser().absolute())
    return ServiceUnit(
        unit_name(arguments.name, home),
        f"{'serves experts of' if serves else 'trains in'} the run {invite.run}",
        (*this_program(), *words, "--plain"),
        variables,
    )


def _check_command(words: Sequence[str]) -> bool:
    """Whether this command serves experts, and does not train. WrongUse for one that no unit can
    run."""
    from node.app.cli import catalogue
    from node.core.wrong_use import WrongUse

    _, given = catalogue.parse(words)
    typed = " ".join([given.command, *([given.action] if hasattr(given, "action") else [])])
    if typed not in SERVED:
        raise WrongUse(
            f"A service cannot run `potluck {typed}`.",
            advice=f"It runs {' or '.join(f'`{one}`' for one in SERVED)}.",
        )
    of_all = [flag for flag in catalogue.flags_of_all() if hasattr(given, flag.removeprefix("--"))]
    if of_all:
        raise WrongUse(
            f"{' and '.join(of_all)} stand before `{typed}`: the unit gets the home and the "
            "settings file by itself."
        )
    if given.invite or given.invite_file or given.code_file:
        raise WrongUse(
            "A service takes no invite and no code.",
            why="It continues in the last run, and everybody on this machine may read its unit.",
            advice=f"Run `potluck {typed} INVITE` once by hand, and install the service then.",
        )
    relative = [one for one in given.trust_module if not Path(one).is_absolute()]
    if relative:
        raise WrongUse(
            f"{relative[0]} is not a whole path.",
            why="A service starts in another folder.",
            advice=f"--trust-module {Path(relative[0]).expanduser().absolute()}",
        )
    return typed != "join"


def _chosen_home(arguments: argparse.Namespace) -> str | None:
    home = getattr(arguments, "home", None) or os.environ.get("POTLUCK_HOME")
    return str(Path(home).expanduser().absolute()) if home else None


def _tell_what_is_left_out(output: Output) -> None:
    """By name: a value may be a secret."""
    names = sorted(one for one in os.environ if one.startswith("POTLUCK_") and one not in PLACES)
    if names:
        output.say(
            f"warning: {', '.join(names)} of this shell do not apply to the service; put what it "
            "needs into the settings file (`potluck config show --origin`)."
        )


def _refuse_another_home(file: Path, unit: ServiceUnit) -> None:
    """Two homes may have folders of the same name."""
    from node.core.wrong_use import WrongUse

    if file.exists() and _home_lines(_own_text(file)) != _home_lines(unit.text()):
        raise WrongUse(
            f"{file} belongs to another home.",
            advice="Choose another name for this one: --name NAME.",
        )


def _home_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "POTLUCK_HOME=" in line]


def _own_text(file: Path) -> str:
    """The text of a unit that `service install` wrote; WrongUse for anybody else's."""
    from node.app.systemd import WRITTEN_HERE
    from node.core.wrong_use import WrongUse

    try:
        text = file.read_text("utf-8", errors="replace")
    except OSError:
        text = ""
    if not text.startswith(WRITTEN_HERE):
        raise WrongUse(
            f"{file} was not written by `potluck service install`.",
            why="It does not begin as its units do, so it is left alone.",
            advice="Name another unit: --name NAME.",
        )
    return text


@contextmanager
def _as_before_if_it_fails(file: Path) -> Iterator[None]:
    """If a unit could not be enabled or started, remove it, so that it does not start at a later
    login; restore an earlier one."""
    from node.app.systemd import NoServices, ask_manager

    before = file.read_text("utf-8") if file.exists() else None
    try:
        yield
    except NoServices:
        if before is not None:
            _write(file, before)
        else:
            with suppress(NoServices):  # it removes the links of `enable`, if there are any
                ask_manager("disable", file.name)
            file.unlink(missing_ok=True)
        with suppress(NoServices):
            ask_manager("daemon-reload")
        raise


def _write(file: Path, text: str) -> None:
    from node.core.disk_trouble import disk_trouble
    from node.core.private_file import replace_private_file
    from protocols.errors import PotluckError

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_private_file(file, text.encode())
    except OSError as error:
        why, advice = disk_trouble(error, file.parent)
        raise PotluckError(f"{file} cannot be written.", why=why, advice=advice) from None


def _runs_here(configuration: Configuration) -> bool:
    from node.core.running_lock import AlreadyRunning, hold_running_lock

    try:
        with hold_running_lock(configuration.places, configuration.key_file):
            return False
    except AlreadyRunning:
        return True
