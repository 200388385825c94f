"""How a node behind a router is reached: reachability, relays, hole punching. Ground floor."""
