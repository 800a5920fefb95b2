"""Checkpoints that are written in the background while training goes on, with policies for saving and keeping them.

    checkpoints = coordinator.Checkpoints(checkpoint, directory, save=[EverySteps(1000)], keep=[Latest(3)])
    strategy.restore_from(checkpoints)
    ...
    checkpoints.save()      # call it as often as you like; it saves if a policy is due

docs/checkpoints.md has the guarantees. The names of this package are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
