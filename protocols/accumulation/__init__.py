"""Training together: progress, state, and the optimizer that many peers share.

`collaboration.open_collaboration` is the trio side, `optimizer.CollaborativeOptimizer` the side
of the training loop, `bridge.Bridge` the one narrow place where they meet.
"""
