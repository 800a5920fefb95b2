"""Runs all trials of an experiment on servers that are started for it, and shows the progress.

No server and no thread of it is left when it returns or raises, at Ctrl-C too.
"""

import os
import pathlib
import tempfile
from collections.abc import Callable

from coordinator.options import Options
from coordinator.testbed.experiment import Experiment, missing
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.loss_curve import LossCurve
from coordinator.testing.local_cluster import LocalCluster

# In seconds. A server on a fully loaded machine may be silent for long, and must not count as lost.
_HEARTBEAT_TIMEOUT = 60.0


def measure(experiment: Experiment, data: ImageData, on_result: Callable[[LossCurve], object]) -> None:
    """Runs one trial after another; prints the result of each, and shows a progress bar on a terminal.

    Args:
      experiment: defines the trials.
      data: the images.
      on_result: called with the loss curve of each trial that has ended.

    Raises:
      LaunchError: tqdm is not installed, or a server did not start.
      KeyboardInterrupt: at Ctrl-C; `on_result` was called for the trials that had ended.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        raise missing("tqdm") from None
    # TensorFlow reads these when it is loaded: no messages, and no accelerator, for which the step time is not chosen.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    trials = experiment.trials()
    with (
        tqdm(total=sum(map(experiment.batches_of, trials)), unit="batch", smoothing=0.05, disable=None) as progress,
        tempfile.TemporaryDirectory(prefix="coordinator-testbed-") as folder,
        LocalCluster(experiment.most_workers, 1) as cluster,
    ):
        import tensorflow as tf

        from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
        from coordinator.testbed.runner import RecordFile, Runner

        # Each trial traces the functions of its rule: TensorFlow's warning about that does not apply.
        tf.get_logger().setLevel("ERROR")
        records = RecordFile(data, pathlib.Path(folder) / "images")
        options = Options(heartbeat_timeout=_HEARTBEAT_TIMEOUT)
        with ParameterServerStrategy(cluster.resolver, options=options) as strategy:
            runner = Runner(strategy, experiment, records, data.shape)
            for trial in trials:
                progress.set_description(str(trial))
                curve = runner.run(trial, progress.update)
                on_result(curve)
                progress.write(str(curve))
