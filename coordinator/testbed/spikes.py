"""How often a loss rises when it should fall."""

import math
from collections.abc import Iterable

# In units of the loss, of which guessing one of ten classes costs 2.3.
HEIGHT = 0.1


def count_spikes(losses: Iterable[float], height: float = HEIGHT) -> int:
    """Counts the spikes of a smoothed loss.

    A spike begins when the loss is more than `height` above the least that it was since the last spike, and ends when
    it is more than `height` below the spike's top. So what rises in many small steps, or never comes down again, is
    one. What is no number counts as infinitely high.

    Args:
      losses: in their order.
      height: how far a loss rises in a spike, at least.
    """
    count, is_up, low, top = 0, False, math.inf, -math.inf
    for loss in losses:
        value = math.inf if math.isnan(loss) else loss
        if is_up:
            top = max(top, value)
            # A top without end is never left: the training is lost.
            is_up, low = value >= top - height, value
        else:
            low = min(low, value)
            is_up, top = value > low + height, value
            count += int(is_up)
    return count
