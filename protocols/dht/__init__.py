"""A directory that nobody runs and nobody can forge: a Kademlia of signed slots.

Under a key, every publisher owns exactly one slot: `(key, publisher) -> value, expires, sequence,
signature`. Nobody can write, overwrite or forge another's slot; merging is trivial, because the
newest sequence wins; and everything expires. Everything except `service` and the small shells
beside it is pure: no I/O, no clock, no chance of its own.
"""
