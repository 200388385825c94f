"""`potluck backbone`: an organiser's peer that keeps a run alive, and can be monitored.

It is `potluck run start --keep-only` with a relay and an HTTP face: others join at it, it keeps
checkpoints, helps to average and brings no samples; `/metrics`, `/healthz` and `/readyz` report its
state. With `--relay-only` there is no run: it is a node to join through that relays and dials back,
and torch is not even imported.

The HTTP face comes up before the run is entered, which can take long if a large state has to be
read. A health check then gets a 503 with the reason, and not silence.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from node.core.wrong_use import WrongUse

if TYPE_CHECKING:
    from auth.server.settings import ListenAddress
    from node.app.cli.output import Output
    from node.app.cli.parser import Subparsers
    from node.core.configuration import Configuration
    from node.core.settings import Value

OF_A_RUN = (  # flags that mean nothing to a node that only relays
    "--device",
    "--threads",
    "--max-device-memory",
    "--offload",
    "--quota",
    "--schedule",
    "--when-idle",
)
DEFAULT_HTTP = "127.0.0.1:8481"  # a first auth server is at 8480

OTHER_DEFAULTS: Final[dict[str, Value]] = {"relay.serve": True, "dht.keep_slots": True}
RELAY_ONLY_DEFAULTS: Final[dict[str, Value]] = OTHER_DEFAULTS | {
    "relay.for": "everybody",
    # fixed, because others write the addresses down and there is no folder to remember a port in
    "network.listen": ("/ip4/0.0.0.0/tcp/4001", "/ip6/::/tcp/4001"),
}


def add_parser(subparsers: Subparsers) -> None:
    from node.app.cli.configured import add_off_flag, add_setting_flag
    from node.app.commands.run import add_folder
    from node.app.commands.run_start import add_flags

    parser = subparsers.add_parser(
        "backbone",
        help="keep a run alive and relay for its peers: checkpoints, a page, /metrics, /healthz",
        description="Run an organiser's peer that computes no samples: others join through it, it "
        "relays for those whom nobody can dial, keeps the run's checkpoints in DIR/checkpoints, "
        "helps to average, and serves the state to newcomers. It does all that `potluck run start "
        "DIR --keep-only` does. Over HTTP it serves the run's page, which `potluck page` opens in "
        "a browser: the loss, the speed, who is there, the leaderboard, how to join. It also "
        "answers /metrics for Prometheus, /healthz with 200 "
        "while it listens, has joined and writes checkpoints, and /readyz with 200 while it "
        "listens, has joined and its relay has room; otherwise 503 with the reasons. See "
        "docs/operators.md.\n\n"
        "DIR is the organiser's folder or a copy of it (run.toml and run.signed). This peer does "
        "not need the organiser's key. With --relay-only there is no DIR and no run: the node "
        "relays for everybody, dials back, and is one to join through.\n\n"
        "The HTTP answers have no password, and answer only this machine unless --http names "
        "another address. Ctrl-C writes a last checkpoint and leaves.",
        example="potluck backbone poem\n"
        "potluck backbone poem --listen /ip4/0.0.0.0/tcp/4001 --http 127.0.0.1:9100\n"
        'potluck backbone --relay-only --relay-limits "circuits=64, month=500GB/month"\n'
        "potluck backbone poem --threads 1 --systemd\n"
        "curl -s http://127.0.0.1:8481/readyz",
    )
    add_folder(parser, default=None)
    parser.add_argument(
        "--relay-only",
        action="store_true",
        help="take part in no run: relay, dial back, and keep a share of the directory, on port "
        "4001 unless --listen says otherwise",
    )
    parser.add_argument(
        "--http",
        metavar="HOST:PORT",
        default=DEFAULT_HTTP,
        help=f"the address of the page, /metrics, /healthz and /readyz ({DEFAULT_HTTP}); a port "
        "of 0 is any that is free",
    )
    parser.add_argument(
        "--systemd",
        action="store_true",
        help="print a system unit for systemd that runs this command line, and do nothing else",
    )
    add_off_flag(parser, "relay.serve", "--no-relay", "do not relay for others")
    add_setting_flag(parser, "relay.limits")
    add_setting_flag(parser, "relay.for")
    # it computes no passes, and has /metrics; a unit could not write to any path of a tracker
    add_flags(parser, without=("limits.compile", "tracking.track"))


def run(arguments: argparse.Namespace) -> int:
    from node.app.cli.configured import configuration_for
    from node.app.cli.listen_flag import listen_flag
    from node.app.cli.output import Output

    address = listen_flag("--http", arguments.http)
    defaults = RELAY_ONLY_DEFAULTS if arguments.relay_only else OTHER_DEFAULTS
    configuration = configuration_for(arguments, defaults)
    if arguments.relay_only:
        _refuse_a_run(arguments, configuration)
    elif arguments.folder is None:
        arguments.folder = "."
        if not Path("run.toml").exists():
            raise WrongUse(
                "There is no run in this folder.",
                why="A backbone keeps the run whose run.toml is in DIR, or here without DIR.",
                advice="Type `potluck backbone DIR`; without any run `potluck backbone "
                "--relay-only` relays for everybody.",
            )
    _check_room(configuration)
    output = Output.of(arguments)
    if arguments.systemd:
        return _print_unit(arguments, configuration, address, output)
    if arguments.relay_only:
        from node.app.relay_only import relay_in_foreground

        return relay_in_foreground(configuration, address, output)
    return _keep_run(arguments, address)


def _refuse_a_run(arguments: argparse.Namespace, configuration: Configuration) -> None:
    """WrongUse for what only makes sense with a run."""
    from node.app.cli.configured import typed_settings

    if arguments.folder is not None:
        raise WrongUse(
            f"{arguments.folder} is not needed with --relay-only.",
            why="A node with --relay-only takes part in no run.",
            advice=f"To keep the run, leave --relay-only out; it relays, too, with --relay-for "
            f"everybody for strangers. To only relay, leave {arguments.folder} out.",
        )
    if configuration.relay_limits is None:
        raise WrongUse(
            "--relay-only needs the relay, which is switched off.",
            why=f"relay.serve is false ({configuration.origins['relay.serve']}).",
            advice="`potluck listen` runs a node that neither trains nor relays.",
        )
    given = {
        "--qr": arguments.qr is not None,
        "--from-peers": arguments.from_peers,
        "--trust-module": bool(arguments.trust_module),
    }
    unfit = [flag for flag, is_given in given.items() if is_given]
    unfit += [word for word in typed_settings(arguments, configuration) if word in OF_A_RUN]
    if unfit:
        raise WrongUse(
            f"{' and '.join(unfit)} cannot be used with --relay-only.",
            why="It is about a run, and there is none.",
            advice="`--relay-limits month=500GB/month` limits what it relays."
            if "--quota" in unfit
            else "",
        )


def _check_room(configuration: Configuration) -> None:
    """Every reservation is a connection that its peer keeps open."""
    limits, most = configuration.relay_limits, configuration.inbound_connections
    if limits is not None and limits.reservations >= most:
        raise WrongUse(
            f"The relay cannot hold {limits.reservations:,} reservations.",
            why=f"Each is an open connection, and network.inbound_connections is {most:,}.",
            advice="Allow more connections (POTLUCK_NETWORK_INBOUND_CONNECTIONS), or fewer "
            "reservations (--relay-limits reservations=N).",
        )


def _keep_run(arguments: argparse.Namespace, address: ListenAddress) -> int:
    from node.app.commands.run_start import start_peer

    return start_peer(
        arguments, "potluck backbone", keeps_only=True, http=address, defaults=OTHER_DEFAULTS
    )


def _print_unit(
    arguments: argparse.Namespace,
    configuration: Configuration,
    address: ListenAddress,
    output: Output,
) -> int:
    import os

    from node.app.cli.configured import typed_settings
    from node.app.systemd import BackboneUnit, this_program

    words = [*this_program(), "backbone"]
    folder = None
    if arguments.relay_only:
        words.append("--relay-only")
    else:
        folder = Path(arguments.folder).expanduser().absolute()
        words.append(str(folder))
    words += ["--plain", "--http", arguments.http]
    if arguments.from_peers:
        words.append("--from-peers")
    for module in arguments.trust_module:
        words += ["--trust-module", str(Path(module).expanduser().absolute())]
    words += typed_settings(arguments, configuration)
    chosen = getattr(arguments, "home", None) or os.environ.get("POTLUCK_HOME")
    config = configuration.places.config_file
    unit = BackboneUnit(
        command=words,
        folder=folder,
        home=None if chosen is None else Path(chosen).expanduser().absolute(),
        config_file=config if configuration.places.config_file_origin != "default" else None,
        configuration=configuration,
        http_port=address.port,
    )
    output.data({"text": unit.text()}, unit.text().rstrip("\n"))
    return 0
