"""The simulated network. Use it through `protocols.testing.world`.

Read in this order: `link_model` (pure: when a byte arrives), `timeline` (scheduled calls),
`stream`, `link`, `simulated_node`, then `world`.
"""
