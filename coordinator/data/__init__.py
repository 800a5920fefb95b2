"""Data whose examples each count exactly once in the model, even if workers, servers or the program die.

    source = coordinator.data.arrays(x, y)
    epochs = coordinator.data.Epochs(source, batch_size=256, epochs=3, shuffle=17)

    for positions in epochs.on(strategy):
        strategy.schedule(step, args=(positions,))     # reads its batch: x, y = source.read(positions)

The client gives each function a range of examples. A range counts when its function has finished. The ledger of ranges
is saved with the model, and both go back together: docs/data.md has the guarantees.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
