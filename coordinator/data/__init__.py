"""Data whose examples each count exactly once in the model, even if workers, servers or the program die.

    source = coordinator.data.arrays(x, y)
    epochs = coordinator.data.Epochs(source, batch_size=256, epochs=3, shuffle=17)

    for positions in epochs.on(strategy):
        strategy.schedule(step, args=(positions,))     # step reads the batch: x, y = source.read(positions)

The client gives each function a range of examples. A range counts as done when its function has finished. The ledger of
ranges is saved and restored together with the model. docs/data.md has the guarantees.

The names of this package are imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
