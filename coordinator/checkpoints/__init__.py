"""Checkpoints that are snapshots, written while training goes on, with policies for saving and keeping them.

    checkpoints = coordinator.Checkpoints(checkpoint, directory, save=[EverySteps(1000)], keep=[Latest(3)])
    strategy.restore_from(checkpoints)
    ...
    checkpoints.save()      # as often as you like; it saves if one of the policies says so

docs/checkpoints.md has the guarantees. Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
