"""The parts of every node, whether it trains or not.

Read in this order: `node` (starts and ends everything), `places`, `settings` and `configuration`
(the settings and where they come from), `key_file` and `running_lock` (its identity, and that it
runs only once), `directory` (its part of the DHT), `access` (its membership in a closed run),
`caps` (the owner's limits), `control` and `control_client` (how commands ask a running node),
`status`.
"""
