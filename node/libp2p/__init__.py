"""py-libp2p 0.8.1, made fit for a node that must not fall over: one small module per idea.

Everything that imports libp2p lives here, in `node/transport/` and in `node/libp2p_network.py`;
protocols never see it. What the stock library does wrong is worked around here, each in a piece
of its own that names the library's file and line, with a test in `tests/libp2p/` that shows the
stock behaviour and so tells us when a newer version no longer needs the piece.

| module | idea |
|---|---|
| `quiet_import` | the library configures logging when imported: it must not |
| `settings` | every limit and time of the real network |
| `addresses`, `address_book` | where peers are, and what of it is remembered |
| `interfaces`, `own_addresses` | where we are |
| `dialler`, `dialling`, `dial_failure` | try all addresses side by side; say why each failed |
| `listening`, `inbound_limit` | accept, count the living, drop those who do not shake hands |
| `swarm`, `connection` | the library's swarm, with guarded entries and no auto-connector |
| `negotiation`, `selection` | multistream-select in one round trip, bounded |
| `upgrading`, `host` | Noise alone, Yamux alone; the library's host built from its parts |
| `shared_dials`, `surplus_links` | one dial and one link per peer |
| `stream` | the contract's stream over a muxed stream |
| `identify`, `introductions` | tell and learn agent, addresses and protocols, bounded |
| `link_table` | which connection is the link to a peer, and events when that changes |

Easy to get wrong: `node.libp2p` is this package, `libp2p` is the library; imports here are
absolute, so the two never mix. Importing any module of this package imports the library, quietly.
"""

import node.libp2p.quiet_import  # noqa: F401  before any module here imports the library
