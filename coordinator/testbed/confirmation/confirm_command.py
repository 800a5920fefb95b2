"""`coordinator testbed --confirm`: prints what real servers and the simulator came to, side by side."""

import os
from collections.abc import Mapping
from typing import Any

from coordinator.testbed.extra import missing


def confirm(given: Mapping[str, Any]) -> None:
    """Runs the command.

    Args:
      given: its options by name; None for what was not given.

    Raises:
      SettingError: what was asked for cannot be.
      LaunchError: tqdm is not installed, or a server did not start.
      Exception: what `ParameterServerStrategy.join` raises.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        raise missing("tqdm") from None
    # TensorFlow reads it when it is loaded, which is now.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    # Each setting traces the functions of a rule of its own: that is no mistake to be warned of.
    tf.get_logger().setLevel("ERROR")
    from coordinator.testbed.confirmation.comparison import table, times_table, verdict
    from coordinator.testbed.confirmation.confirmation import Confirmation

    asked = Confirmation.of(given)
    print(asked, flush=True)
    load = os.getloadavg()[0]
    with tqdm(total=asked.runs, unit="run", disable=None) as progress:
        comparisons = asked.compare(progress.update)
    print(f"{os.cpu_count()} cpus, load {load:.1f} at the beginning and {os.getloadavg()[0]:.1f} at the end")
    print(f"\nWhat real steps took, and the simulator was given; means:\n\n{times_table(comparisons)}")
    print(f"\nReal, and simulated:\n\n{table(comparisons)}\n\n{verdict(comparisons)}", flush=True)
