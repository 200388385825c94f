"""`potluck auth deny`, `revoke`, `spread` and `keys withdraw`: what the whole swarm must hear of.

A running server gives its list of revocations to every node that polls it, so an act that it did
needs nothing more. When the act was done on a stopped server's database, the list is brought into
the swarm's directory, through the run's endpoints (auth_publishing.py), or handed to the node that
runs on this machine; from there the nodes pass it on.

Easy to get wrong: to revoke and to be heard are two things. The act is done and on disk before
anything is sent; that nobody could be told is said in its answer, with exit code 4, and `potluck
auth spread` tries again.
"""

from __future__ import annotations

import argparse
import base64
from typing import Any

from node.auth_places import AuthPlaces
from node.commands import exit_codes
from node.commands.auth_acting import asked, auth_places_for, perform_act, provider_ids
from node.commands.configured import configuration_for
from node.commands.output import Output
from node.configuration import Configuration
from node.failure import failure_of
from protocols.errors import Unreachable
from protocols.identity import Identity

ACTS = ("deny", "revoke", "keys-withdraw", "spread")


def run(arguments: argparse.Namespace) -> int:
    """Do the act, see that it is heard of, print both; the exit code."""
    from node.commands.auth_view import show

    act = "-".join(filter(None, (arguments.action, getattr(arguments, "act", None))))
    places = auth_places_for(arguments)
    configuration = configuration_for(arguments)  # a wrong flag is said before anything is done
    courier = Courier(places, configuration)
    if act == "spread":
        answer, acted_here = courier.list_in_words(), True
    else:
        if act == "keys-withdraw":
            courier.prepare_for_withdrawal(arguments.key)
        question = {**vars(arguments), "providers": provider_ids(places)}
        answer, acted_here = perform_act(places, act, asked(act, question))
    nothing_new = answer.get("forget_ms") == 0 and act != "spread"
    if nothing_new:
        spread: dict[str, Any] = {"way": "none"}
    elif acted_here:
        spread = courier.spread()
    else:
        spread = {"way": "server"}
    show(act, {**answer, "spread": spread}, Output.of(arguments))
    return exit_codes.UNREACHABLE if spread["way"] == "nobody" else exit_codes.DONE


class Courier:
    """Brings the newest list into the swarm, under a name that is used once."""

    def __init__(self, places: AuthPlaces, configuration: Configuration) -> None:
        self._places = places
        self._configuration = configuration
        self._identity = Identity.generate()
        self._token = b""

    def prepare(self) -> None:
        """Get the token with which the nodes let us in."""
        if not self._token:
            peer = self._identity.public_key.hex()
            answer, _ = perform_act(self._places, "courier", {"peer": peer})
            self._token = base64.b64decode(answer["token"])

    def prepare_for_withdrawal(self, key: str) -> None:
        """Get the token while the key that every node knows still signs.

        A token of the key that comes after it would be unknown everywhere: no server runs that
        the nodes could ask for its record.
        """
        answer, acted_here = perform_act(self._places, "keys-list", {})
        wanted = key.strip().lower()
        is_there = any(wanted in (one["key_id"], one["fingerprint"]) for one in answer["keys"])
        if acted_here and is_there:
            self.prepare()

    def list_in_words(self) -> dict[str, Any]:
        """What the newest list has, for a person."""
        from auth.revocations import read_list

        perform_act(self._places, "keys-list", {})  # says what is wrong where there is no server
        newest = read_list(self._published().revocations.signed)
        return {
            "list_number": newest.number,
            "entries": len(newest.entries),
            "withdrawn_keys": [key_id.hex() for key_id in newest.withdrawn],
        }

    def spread(self) -> dict[str, Any]:
        """Bring the list to the swarm; how that went. The act is done: whatever fails is told."""
        failures = []
        for way in (self._into_the_directory, self._to_the_node_here):
            try:
                return way()
            except Exception as error:  # noqa: BLE001 - see above; a bug is told with its name
                failure = failure_of(error)
                failures.append(" ".join(part for part in (failure.what, failure.why) if part))
        return {"way": "nobody", "why": " ".join(failures)}

    def _into_the_directory(self) -> dict[str, Any]:
        from auth.server.settings import read_settings

        endpoints = [
            *self._configuration.bootstrap_addresses,
            *read_settings(self._places.settings_file).endpoints,
        ]
        if not endpoints:
            raise Unreachable("No node of the run is known: `endpoints` in auth.toml is empty.")
        from node.commands.auth_publishing import publish

        self.prepare()
        published = self._published()
        replicas = publish(
            self._identity, self._token, published.keys.run, published.revocations.signed,
            published.keys.records, tuple(dict.fromkeys(endpoints)),
        )  # fmt: skip
        return {"way": "directory", "replicas": replicas}

    def _to_the_node_here(self) -> dict[str, Any]:
        from node.access.questions import REVOCATIONS
        from node.control_client import ask_once

        document = base64.b64encode(self._published().revocations.signed).decode("ascii")
        socket = self._configuration.places.control_socket
        answer = ask_once(socket, REVOCATIONS, {"list": document})
        return {"way": "node", "number": answer["number"]}

    def _published(self) -> Any:
        from auth.server.store import Reader

        return Reader(self._places.folder).published()
