"""A simulated cluster: workers, network, parameter servers and update rules as discrete events, without TensorFlow.

    from coordinator import simulation

    result = simulation.simulate(simulation.Setting(
        workers=200, ps=20, rule=simulation.BoundedDelay(8, grads_to_wait=200), compute="lognormal(50ms,0.4)"))
    print(result)

The simulation predicts the speed of a cluster, the staleness of gradients, and the idle time of workers. The names of
this package are imported on first use, and do not import TensorFlow.
"""

import lazy_loader

from coordinator.errors import SettingError as SettingError

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["SettingError"]


def __dir__() -> list[str]:
    return sorted(__all__)
