"""Training together: progress, state, and the optimizer that many peers share.

`collaboration.open_collaboration` is the trio side, `optimizer.CollaborativeOptimizer` is the side
of the training loop, and `bridge.Bridge` is the one place where they meet.
"""
