"""What a command shows to a person, or prints, of what a node or a server answered.

The live screen is in `node.app.screen`, the findings of `potluck doctor` in `node.app.doctor`.
"""
