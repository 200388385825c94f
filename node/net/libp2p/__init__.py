"""py-libp2p 0.8.1, made robust enough for a node: one small module for each idea.

Only this package and `node/net/transport/` import libp2p; protocols never see it. Faults of the
stock library are worked around here. Each workaround is separate and names the library's file and
line. A test in `tests/libp2p/` shows the stock behaviour, and so shows when a newer version no
longer needs the workaround.

| module | idea |
|---|---|
| `quiet_import` | the library configures logging when imported: it must not |
| `settings` | every limit and time of the real network |
| `addresses`, `address_book` | where peers are, and what of it is remembered |
| `own_addresses` | where we are |
| `dialler`, `dial_failure` | try all addresses, one race per peer; say why each failed |
| `listener` | accept, count the living, drop those who do not shake hands |
| `swarm` | the library's swarm, with guarded entries and no auto-connector |
| `connection` | one connection, and the contract's stream over a muxed stream |
| `negotiation` | multistream-select in one round trip, bounded |
| `upgrading`, `host` | Noise alone, Yamux alone; the library's host built from its parts |
| `identify`, `introductions` | tell and learn agent, addresses and protocols, bounded |
| `link_table` | which connection is the link to a peer, and events when that changes |

`node.net.libp2p` is this package, `libp2p` is the library. All imports here are absolute, so the
two are never confused. Importing any module of this package imports the library, without its
logging setup.
"""

import node.net.libp2p.quiet_import  # noqa: F401  before any module here imports the library
