"""The test-bed: the effect of stale gradients on training, on real servers of this machine; see `docs/testbed.md`.

The command `coordinator testbed` runs it.
"""
