"""How near the advice about the number of workers comes to what is then measured.

    python -m benchmarks.scale_advice [--workers 1 2 3 4] [--seconds 12] [--wait 0.02] [--compute 0] [--size 1000000]

For each number of workers a separate cluster runs steps that wait, which uses no processor, then compute, which does,
and then add to a variable of `size` floats on the one parameter server. The table has the measured rate, and those that
the advice and the simulation of the trace of each other run expect.

    --wait 0.02 --compute 0 --size 1000000    four workers keep half of two processors busy
    --wait 0 --compute 2000 --size 1000       two workers fill two processors with their own computation
    --wait 0.02 --compute 0 --size 6000000    two workers fill two processors with reading and adding large variables
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from typing import Any

from benchmarks.piped_process import ROOT
from coordinator.simulation import Setting, simulate
from coordinator.simulation.request import calibration
from coordinator.simulation.result import aligned

# For how long steps run before anything is measured, in seconds. The page's rates are means of 10 seconds.
_WARM_UP = 4.0


def measure(workers: int, seconds: float, wait: float, compute: int, size: int, trace: str) -> dict[str, Any]:
    """Trains in this process, with steps that wait for workers all along; returns the rate and the advice."""
    import tensorflow as tf

    from coordinator import Options, ParameterServerStrategy
    from coordinator.testing import LocalCluster
    from coordinator.updates.rule_state import pause

    with (
        LocalCluster(workers=workers, ps=1) as cluster,
        ParameterServerStrategy(cluster.resolver, options=Options(dashboard="127.0.0.1:0")) as strategy,
    ):
        with strategy.scope():
            variable = tf.Variable(tf.zeros([size]))

        @tf.function
        def step(begin: Any) -> Any:
            with tf.control_dependencies([pause(tf.constant(wait, tf.float64) + 0.0 * begin)]):
                # Not a constant, of which the product would be one, too.
                matrix = tf.fill([32, 32], 0.01 + 0.0 * tf.cast(begin, tf.float32))
            for _ in tf.range(compute):
                matrix = matrix @ matrix
            with tf.control_dependencies([matrix]):
                return variable.assign_add(tf.ones([size]))[0]

        def train(seconds: float) -> float:
            """Trains for some time, and returns the rate."""
            began, before = time.monotonic(), strategy.cluster.statistics().finished
            while time.monotonic() < began + seconds:
                futures = [strategy.schedule(step, args=(tf.timestamp(),)) for _ in range(40 * workers)]
                futures[0].result(60)
            return (strategy.cluster.statistics().finished - before) / (time.monotonic() - began)

        def advice() -> Any:
            return json.load(urllib.request.urlopen(f"{strategy.dashboard_url}api/target", timeout=60))

        # Tells the dashboard that somebody looks.
        advice()
        train(_WARM_UP)
        with strategy.trace(trace):
            rate = train(seconds)
            # Steps still wait: what was measured last is not the end of the training.
            found = {"rate": rate, "advice": advice()}
        strategy.join(60)
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--wait", type=float, default=0.02)
    parser.add_argument("--compute", type=int, default=0, help="products of 32x32 matrices in a step")
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--trace", help="measures the first number of workers in this process; prints JSON")
    given = parser.parse_args(arguments)
    if given.trace:
        print(json.dumps(measure(given.workers[0], given.seconds, given.wait, given.compute, given.size, given.trace)))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {count: _run(given, count, pathlib.Path(folder)) for count in given.workers}
        rows = [_row(folder, basis, count, found) for basis in found for count in found]
    print(aligned(["from", "to", "measured", "advice", "error", "simulated", "error"], rows))
    print(*(f"{count}: {of_count['advice']['text']}" for count, of_count in found.items()), sep="\n")


def _run(given: argparse.Namespace, workers: int, folder: pathlib.Path) -> dict[str, Any]:
    settings = [f"--{name}={getattr(given, name)}" for name in ("seconds", "wait", "compute", "size")]
    command = [sys.executable, "-m", "benchmarks.scale_advice", "--workers", str(workers), *settings]
    command += ["--trace", str(folder / f"{workers}.json")]
    printed = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def _row(folder: str, basis: int, count: int, found: dict[int, dict[str, Any]]) -> list[str]:
    measured = found[count]["rate"]
    advised = found[basis]["advice"]["expected"].get(str(count), float("nan"))
    settings = calibration(pathlib.Path(folder) / f"{basis}.json").settings
    simulated = simulate(Setting(**(settings | {"workers": count}))).gradients_per_second
    errors = [f"{expected / measured - 1:+.0%}" for expected in (advised, simulated)]
    return [f"{basis}", f"{count}", f"{measured:.1f}", f"{advised:.1f}", errors[0], f"{simulated:.1f}", errors[1]]


if __name__ == "__main__":
    main()
