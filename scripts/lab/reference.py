"""Write docs/laboratory.md from the parsers, from the top of a checkout:

    PYTHONPATH=scripts .venv/bin/python -m lab.reference

A test fails when the page is not current.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lab.__main__ import PROGRAMS, parser_of
from node.app.cli.reference import sections

PAGE = Path("docs/laboratory.md")

_INTRODUCTION = """\
# The laboratory

This page is written by `PYTHONPATH=scripts .venv/bin/python -m lab.reference`; change the
commands, not the page.

`scripts/bench` measures potluck on this machine, with real processes. `scripts/simulate` shows
what many nodes would do, in virtual time and with the protocols of real nodes. `scripts/reproduce`
measures the claims of the papers, with both. All run from a checkout; an installed potluck does not
have them. Like `potluck`, they print results to stdout and everything else to stderr, one JSON
object with `--json`, and end with the exit codes of [cli.md](cli.md).

How fast the transport is:

```sh
./scripts/bench transport --quick --only unary_ms_p50
```

How fast a thousand peers come to agree on an average when some of them fail, in groups and in
other ways:

```sh
./scripts/simulate moshpit --method all --failure-rate 0.005
```

How a training run fares whose peers die and come: whether all hold the same bits after every step,
how many steps a minute they make, how soon a newcomer is in one, and what it costs each peer in
traffic and processor time:

```sh
./scripts/simulate run --peers 4 --steps 3 --churn 120
```

Which claims of the papers can be measured again. [results.md](results.md) has what was found;
`scripts/reproduce --all` takes about an hour on a core without other work, and
`scripts/reproduce --short` minutes. Both end with how long it took and how many claims hold:

```sh
./scripts/reproduce
```

To compare the transport, the directory, the averaging, the training and the experts with
hivemind's, on the same machine in the same minutes, see `scripts/bench-against-hivemind --help`.
Except for `--what training` it also needs `--scripts DIRECTORY`, with scripts that measure hivemind
and are not in this repository. Each does with hivemind what our bench does with potluck, takes the
arguments that `scripts/bench-against-hivemind` gives it, and prints JSON as its last line. For
`--what averaging` there are two. `bench_averaging.py` does not count its first round, and prints
`rounds_ok`, `errors`, the seconds in which a round exchanges values as
`{"agg_wall": {"median": …}}`, the processor time of all peers in it as `cpu` in the same form, and
`pss_sum_per_peer_mib`. `bench_gloo.py` averages with gloo, and prints `wall` and `cpu` like that.

To compare two versions of potluck, make a checkout of each and run the same bench in both, in turn,
at least five times. The processes share the machine with all other programs, so compare medians of
figures from the same minutes, and look at the spread.

`.venv/bin/python scripts/picture terminal` makes the pictures of the screen in docs/pictures again,
from scenes (scripts/lab/scenes.py), and `scripts/picture page` those of the run's page, with
Chromium, from others (scripts/lab/page/scenes.py). With `--state`, `--size` and, for the page,
`--dark` they make one picture of any state. `scripts/picture demo FOLDER` plays `potluck demo`,
opens its page, and makes pictures of it at the seconds 5, 20 and 40, and when one volunteer was
killed and the late one takes part.
"""

_NETWORK_LAB = """\
## The network lab

`lab.net` builds homes behind routers, on an internet of their own, for tests that need a real
kernel. It needs Linux, root, iproute2 and nftables, and touches no interface of the machine.

```python
with NetworkLab(round_trip_seconds=0.06) as lab:
    relay = lab.host("relay")
    left = lab.home("left", RouterKind.PORT_RESTRICTED, upload_bits_per_second=5e6)
    right = lab.home("right", RouterKind.SYMMETRIC, udp_blocked=True)
    process = left.popen([sys.executable, "-m", "node", "listen"])
    with right.blackout():
        left.router.change_address()
```

| router | shows a port of a machine as | lets in |
|---|---|---|
| `NONE`: the machine is on the internet itself | the same | everything |
| `MAPPED` | the same | answers, and ports that a machine asked for (by UPnP; needs miniupnpd) |
| `FORWARDED` | the same | answers, and the ports that its owner has forwarded |
| `CONE` | the same | what comes from an address that the port has sent to |
| `PORT_RESTRICTED` | the same | answers: what comes from an address and port that it has sent to |
| `SYMMETRIC` | another one for each destination | answers |
| `DOUBLE`: a carrier's NAT before the home's | the same | answers |

What they do not let in they drop without an answer, and a home cannot reach itself by its public
address. A home may have IPv4, IPv6 or both. For IPv6, each router is a firewall that lets nothing
unsolicited in, or everything if it is open (`ipv6_open`).

The delay is a program that carries the frames between the homes, because the kernel's netem is not
everywhere. At 60 ms it has carried 475 MB/s from eight homes with 0.4 of a core. Lines with a rate
carry packets of usual size, which cost more: 48 MB/s took half a core.

The laboratory is removed when the block is left, and also when its process is killed. If everything
was killed, the next laboratory removes what is left. `ip netns` shows its namespaces: their names
begin with `potluck-lab` and the process id of their owner.
"""


def reference() -> str:
    """The whole page."""
    lines = [_INTRODUCTION]
    for program in PROGRAMS:
        lines += sections(parser_of(program))
    lines += ["", _NETWORK_LAB]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(f"wrote {PAGE}", file=sys.stderr)
