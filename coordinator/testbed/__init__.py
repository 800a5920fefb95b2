"""The test-bed: the effect of stale gradients on training, on real servers of this machine; see `docs/testbed.md`.

`coordinator testbed` runs it.
"""
