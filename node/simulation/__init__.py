"""The parts of the simulated network; `node.simulated_network` is the door to it.

Read in this order: `link_model` (pure: when does a byte arrive), `timeline` (what happens when),
`stream`, `link`, `simulated_node`, then the world itself in `node/simulated_network.py`.
"""
