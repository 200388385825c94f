"""Our node and js-libp2p at a public address, ask each other by AutoNAT v2, as a process.

`python -m tests.strangers.public_place CACHE` in a network namespace of its own, where the address
is nobody's but ours. js-libp2p judges no private address. It prints a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import trio

from nat.reachability import DialBacks, Judge
from node.net.libp2p.settings import Libp2pSettings
from node.net.network import open_libp2p_network
from protocols.identity import Identity, PeerId
from tests.strangers import javascript_stranger
from tests.strangers.javascript_stranger import JavascriptStranger
from tests.waiting import PATIENCE_SECONDS, until

PLACE = "/ip4/9.8.7.6/tcp"
THEIR_PORT = 4001


async def ask_each_other(js: JavascriptStranger, ours: Identity) -> dict[str, object]:
    them = PeerId(js.peer)
    settings = Libp2pSettings(listen_addresses=(f"{PLACE}/0",))
    async with open_libp2p_network(ours, settings) as we, trio.open_nursery() as nursery:
        judge, dial_backs = Judge(we), DialBacks(we)
        await nursery.start(judge.run)
        dial_backs.serve()
        # it announces no public address before somebody has judged it
        we.learn_addresses(them, [f"{PLACE}/{THEIR_PORT}/p2p/{them}"])
        await we.connect(them)
        verdict = await dial_backs.ask(them, we.listened_addresses()[0])
        await until(lambda: bool(judge.outcomes["ok"]), PATIENCE_SECONDS)
        nursery.cancel_scope.cancel()
    return {"their_verdict": verdict.value, "our_outcomes": dict(judge.outcomes)}


def main(cache: Path) -> None:
    for order in ("ip link set lo up", "ip address add 9.8.7.6/32 dev lo"):
        subprocess.run(order.split(), check=True)
    installation = javascript_stranger.install(cache)
    found = []
    for we_are_smaller in (False, True):
        js = JavascriptStranger(installation, "relay", f"{PLACE}/{THEIR_PORT}")
        ours = Identity.generate()
        while (ours.peer_id < js.peer) is not we_are_smaller:
            ours = Identity.generate()
        found.append(trio.run(ask_each_other, js, ours))
        js.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
