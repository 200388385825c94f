"""The application, in layers that import downwards only:

- `net`: the network on py-libp2p, with a transport of our own
- `core`: a node, its settings and places, its directory, access and caps
- `run`: what a run is: definition, invite, checkpoints, model and data built from them
- `training`: taking part in a run
- `app`: the command line, the screen, the backbone's pages, the demo
"""
