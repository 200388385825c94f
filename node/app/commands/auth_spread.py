"""Acts that the whole swarm must know: `potluck auth deny`, `revoke`, `allow --rebind`, `spread`
and `keys withdraw`.

A running server gives its list of revocations to every node that polls it, so its own acts need
nothing more. If the act was done on a stopped server's database, the list is published in the
swarm's directory, through the run's endpoints (auth_publication.py), or handed to the node that
runs on this machine; from there the nodes pass it on.

Revoking and publishing are two steps. The act is done and on disk before anything is sent. If
nobody could be told, the answer says so, with exit code 4, and `potluck auth spread` tries again.
"""

from __future__ import annotations

import argparse
import base64
from typing import Any

from node.app.auth_acts import asked, auth_places_for, perform_act, provider_ids
from node.app.auth_places import AuthPlaces
from node.app.cli import exit_codes
from node.app.cli.configured import configuration_for
from node.app.cli.output import Output
from node.core.configuration import Configuration
from node.core.failure import failure_of
from protocols.errors import Unreachable
from protocols.identity import Identity


def run(arguments: argparse.Namespace) -> int:
    """Perform the act, publish it, and print both. Returns the exit code."""
    from node.app.views.auth_view import show

    act = "-".join(filter(None, (arguments.action, getattr(arguments, "act", None))))
    places = auth_places_for(arguments)
    configuration = configuration_for(arguments)  # a wrong flag is reported before anything is done
    courier = RevocationCourier(places, configuration)
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


class RevocationCourier:
    """Brings the newest list into the swarm, under a name that is used once."""

    def __init__(self, places: AuthPlaces, configuration: Configuration) -> None:
        self._places = places
        self._configuration = configuration
        self._identity = Identity.generate()
        self._token = b""

    def prepare(self) -> None:
        """Get the token that the nodes admit us with."""
        if not self._token:
            peer = self._identity.public_key.hex()
            answer, _ = perform_act(self._places, "courier", {"peer": peer})
            self._token = base64.b64decode(answer["token"])

    def prepare_for_withdrawal(self, key: str) -> None:
        """Get the token while the key that every node knows still signs.

        A token of the next key would be unknown everywhere, because no server runs that the nodes
        could ask for its record.
        """
        answer, acted_here = perform_act(self._places, "keys-list", {})
        wanted = key.strip().lower()
        is_there = any(wanted in (one["key_id"], one["fingerprint"]) for one in answer["keys"])
        if acted_here and is_there:
            self.prepare()

    def list_in_words(self) -> dict[str, Any]:
        """The contents of the newest list, for a person."""
        from auth.revocations import read_list

        perform_act(self._places, "keys-list", {})  # reports what is wrong if there is no server
        newest = read_list(self._published().revocations.signed)
        return {
            "list_number": newest.number,
            "entries": len(newest.entries),
            "withdrawn_keys": [key_id.hex() for key_id in newest.withdrawn],
        }

    def spread(self) -> dict[str, Any]:
        """Publish the list; returns the result. The act is done, so all failures are reported."""
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
        from node.app.auth_publication import publish

        self.prepare()
        published = self._published()
        replicas = publish(
            self._identity, self._token, published.keys.run, published.revocations.signed,
            published.keys.records, tuple(dict.fromkeys(endpoints)),
        )  # fmt: skip
        return {"way": "directory", "replicas": replicas}

    def _to_the_node_here(self) -> dict[str, Any]:
        from auth.documents import encode
        from node.core.access.questions import REVOCATIONS
        from node.core.control_client import ask_once

        published = self._published()
        told = {"list": published.revocations.signed, "keys": encode(published.keys.records)}
        socket = self._configuration.places.control_socket
        answer = ask_once(
            socket,
            REVOCATIONS,
            {name: base64.b64encode(data).decode("ascii") for name, data in told.items()},
        )
        return {"way": "node", "number": answer["number"]}

    def _published(self) -> Any:
        from auth.server.store import StoreReader

        return StoreReader(self._places.folder).published()
