"""Runs a model that counts its examples, with random faults, and reports whether it has seen each one once.

    python -m benchmarks.exactly_once --runs 100 --seconds 30

Each run has a seed, from which follow the update rule, the clusters, whether ranges are read ahead, the faults of
workers and parameter servers (kill, restart, freeze), and when the client is killed, to be started again on a cluster
of another shape. It prints a line of JSON for each run and then a summary: faults by kind, and the seeds of runs that
failed. The exit code is 1 if one did.
"""

import argparse
import contextlib
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Far more than a client needs to start, finish its epoch and end, in seconds.
DEADLINE = 1200.0
_RULES = ("asynchronous", "asynchronous", "bounded_delay", "synchronous")


def run(seed: int, seconds: float, interval: float) -> dict[str, Any]:
    """Makes one run: some clients that are killed, and one that trains for some seconds more and counts.

    Args:
      seed: of the random numbers.
      seconds: the least time that the last client trains, and the longest after which one before is killed.
      interval: mean time between two faults.
    """
    chance = random.Random(seed)
    settings = ["--rule", chance.choice(_RULES), "--seconds", seconds, "--interval", interval]
    if chance.random() < 0.3:
        settings += ["--timeout", 2.0]
    if seed % 3 == 0:
        settings += ["--prefetch", 3]
    kills = chance.choice((0, 1, 1, 2))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for client in range(kills + 1):
            shape = ["--workers", chance.randint(2, 3), "--ps", chance.randint(1, 3)]
            command = [folder, "--seed", chance.randrange(2**31), *shape, *settings]
            with _started(command, folder / "log") as process:
                if client < kills:
                    _wait_saved(process, folder / "saved" / "checkpoint")
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(chance.uniform(0.0, seconds))
                else:
                    process.wait(seconds + DEADLINE)
        faults = [json.loads(line) for line in (folder / "faults").read_text(encoding="utf-8").splitlines()]
        log = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    found = {
        "seed": seed,
        "settings": " ".join(map(str, settings)),
        "faults": dict(Counter(f"{each['kind']} {each['job']}" for each in faults)) | {"kill client": kills},
    }
    if process.returncode != 0:
        return found | {"error": log[-5:], "holds": False}
    found |= json.loads(next(line for line in reversed(log) if line.startswith("{")))
    return found | {"holds": not any((*found["never"], *found["repeated"]))}


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of all runs together."""
    faults: Counter[str] = Counter()
    for each in runs:
        faults.update(each["faults"])
    return {
        "runs": len(runs),
        "hold": sum(each["holds"] for each in runs),
        "never": sum(sum(each.get("never", ())) for each in runs),
        "repeated": sum(sum(each.get("repeated", ())) for each in runs),
        "faults": dict(faults),
        "failed seeds": [each["seed"] for each in runs if not each["holds"]],
    }


@contextlib.contextmanager
def _started(arguments: Sequence[object], log: pathlib.Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a client, and kills it in the end."""
    command = [sys.executable, "-m", "benchmarks.exactly_once_client", *map(str, arguments)]
    with log.open("ab") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


def _wait_saved(process: subprocess.Popen[bytes], path: pathlib.Path) -> None:
    until = time.monotonic() + DEADLINE
    while not path.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the runs, prints them, and returns 0 if all hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactly_once", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, help="of the first run; the others follow it. By default random")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the last client of a run trains at least")
    parser.add_argument("--interval", type=float, default=6.0, help="mean time between two faults, in seconds")
    parser.add_argument("--minutes", type=float, help="begins no run after this time")
    chosen = parser.parse_args(arguments)
    seed = random.randrange(10**6) if chosen.seed is None else chosen.seed
    until = time.monotonic() + 60 * chosen.minutes if chosen.minutes else float("inf")
    runs: list[dict[str, Any]] = []
    while len(runs) < chosen.runs and time.monotonic() < until:
        runs.append(run(seed + len(runs), chosen.seconds, chosen.interval))
        print(json.dumps(runs[-1]), flush=True)
    print(json.dumps(summary(runs)))
    return 0 if all(each["holds"] for each in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
