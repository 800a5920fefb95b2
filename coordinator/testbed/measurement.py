"""Trains all cells of an experiment on servers that are started for it, and shows how far it is.

It promises that no server and no thread of its own is left when it returns or raises, at Ctrl-C too.
"""

import os
import pathlib
import tempfile
from collections.abc import Callable

from coordinator.options import Options
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.extra import missing
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.loss_curve import Curve
from coordinator.testing.local_cluster import LocalCluster

# A machine whose processors are all taken may be silent for long; nothing here is to be saved by giving it up.
_PATIENCE = 60.0


def measure(experiment: Experiment, data: ImageData, take: Callable[[Curve], object]) -> None:
    """Trains one cell after another; says what came of each, and shows a progress bar on a terminal.

    Args:
      experiment: which cells.
      data: the images.
      take: called with each curve when its training is over.

    Raises:
      LaunchError: tqdm is not installed, or a server did not start.
      KeyboardInterrupt: at Ctrl-C; what was trained until then has been taken.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        raise missing("tqdm") from None
    # TensorFlow reads these when it is loaded: quiet, and on the processors that the step time was chosen for.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cells = experiment.cells()
    with (
        tqdm(total=sum(map(experiment.batches_of, cells)), unit="batch", smoothing=0.05, disable=None) as progress,
        tempfile.TemporaryDirectory(prefix="coordinator-testbed-") as folder,
        LocalCluster(experiment.most_workers, 1) as cluster,
    ):
        import tensorflow as tf

        from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
        from coordinator.testbed.record_file import RecordFile
        from coordinator.testbed.runner import Bench

        # Each cell traces the functions of a rule of its own: that is no mistake to be warned of.
        tf.get_logger().setLevel("ERROR")
        records = RecordFile(data, pathlib.Path(folder) / "images")
        with ParameterServerStrategy(cluster.resolver, options=Options(heartbeat_timeout=_PATIENCE)) as strategy:
            bench = Bench(strategy, experiment, records, data.shape)
            for cell in cells:
                progress.set_description(str(cell))
                curve = bench.train(cell, progress.update)
                take(curve)
                progress.write(str(curve))
