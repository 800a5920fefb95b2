"""Runs all trials of an experiment, on servers that are started for it or in virtual time, and shows the progress.

When `measure` returns or raises, even at Ctrl-C, none of its servers and threads is left. TensorFlow is imported after
the servers have started and TensorFlow's environment is set.
"""

import contextlib
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from coordinator.options import Options
from coordinator.simulation.setting import Setting
from coordinator.testbed.experiment import Experiment, Trial, missing
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.results import LossCurve
from coordinator.testing.local_cluster import LocalCluster

if TYPE_CHECKING:
    from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy

# The heartbeat's timeout, in seconds. A server on a fully loaded machine may be silent for long, but is not lost.
_HEARTBEAT_TIMEOUT = 60.0


def measure(
    experiment: Experiment,
    data: ImageData,
    on_result: Callable[[LossCurve], object],
    setting_of: Callable[[Trial], Setting] | None = None,
) -> None:
    """Runs one trial after another; prints the result of each, and shows a progress bar on a terminal.

    `on_result` is called with the loss curve of each trial that has ended. `setting_of` returns the cluster of a trial
    in virtual time; see `SimulatedRunner`.

    Raises:
      LaunchError: tqdm is not installed, or a server did not start.
      KeyboardInterrupt: at Ctrl-C; `on_result` has been called for the trials that have ended.
    """
    trials = experiment.trials()
    with contextlib.ExitStack() as stack:
        total = experiment.repeats * sum(map(experiment.batches_of, trials))
        progress = stack.enter_context(new_progress_bar(total, "batch"))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="coordinator-testbed-"))
        strategy = None
        if experiment.simulated:
            _set_up_tensorflow()
        else:
            options = Options(heartbeat_timeout=_HEARTBEAT_TIMEOUT)
            strategy = stack.enter_context(new_strategy(experiment.most_workers, options))
        from coordinator.testbed.runner import Runner, SimulatedRunner
        from coordinator.testbed.training import RecordFile

        records = RecordFile(data, pathlib.Path(folder) / "images")
        runner: Runner | SimulatedRunner
        if strategy is None:
            runner = SimulatedRunner(experiment, records, setting_of)
        else:
            runner = Runner(strategy, experiment, records)
        for trial, repeat in itertools.product(trials, range(experiment.repeats)):
            progress.set_description(str(trial))
            curve = runner.run(trial, experiment.seed + repeat, progress.update)
            on_result(curve)
            progress.write(str(curve))


def new_progress_bar(total: int, unit: str) -> Any:
    """Returns a progress bar, shown only on a terminal. Raises LaunchError if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        raise missing("tqdm") from None
    return tqdm(total=total, unit=unit, smoothing=0.05, disable=None)


def _set_up_tensorflow() -> None:
    """Sets variables for TensorFlow before it loads: no messages, and no accelerator, as step times are for CPUs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@contextlib.contextmanager
def new_strategy(workers: int, options: Options) -> Iterator["ParameterServerStrategy"]:
    """Starts servers for workers, loads TensorFlow, and yields a strategy. Raises LaunchError if a server fails."""
    _set_up_tensorflow()
    with LocalCluster(workers, 1) as cluster:
        import tensorflow as tf

        from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy

        # Each training traces its rule's functions, so TensorFlow's warning about repeated tracing does not apply.
        tf.get_logger().setLevel("ERROR")
        with ParameterServerStrategy(cluster.resolver, options=options) as strategy:
            yield strategy
