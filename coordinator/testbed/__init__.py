"""The test-bed: what stale gradients do to training, on real servers of this machine. `docs/testbed.md` tells how.

Its modules are imported by their own names; `coordinator testbed` and `python -m coordinator.testbed` run it.
"""
