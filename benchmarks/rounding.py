"""16-bit messages: what they bring to a large dense model, and what they cost in accuracy.

    python -m benchmarks.rounding [--only speed|accuracy] [--repeats 5] [--quick] [--json FILE]

`speed` trains eight layers of 1,024 x 1,024 at batch 16 by plain SGD, with two workers and two parameter servers: 33.6
MB are pulled and pushed in each step. "16 bits" and "feedback" are `updates.Asynchronous` with
`transfer_dtype=tf.bfloat16`, without and with `error_feedback=True`; "32 bits" is the same rule without them; "ours",
"peer" and "bare" are a plain step. Figures are examples per second, and milliseconds of processor time for a step, of
the client and all servers.

`accuracy` trains a network of one hidden layer on scikit-learn's handwritten digits, with each of these rules and
`--repeats` seeds.
"""

import statistics
from collections.abc import Callable, Sequence

import tensorflow as tf

import coordinator
from benchmarks.contest import Contest, Found, plain
from benchmarks.contestants.layers_steps import BATCH_SIZE
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line
from benchmarks.staleness_pauses import NoPauses
from benchmarks.staleness_rules import PS, WORKERS, RuleChoice
from benchmarks.staleness_training import Training, TrainingCluster
from coordinator import updates
from coordinator.simulation.result import aligned
from coordinator.testing import LocalCluster

PARTS = ("speed", "accuracy")
COLUMNS = {
    "16 bits": ("ours", "16 bits"),
    "feedback": ("ours", "feedback"),
    "32 bits": ("ours", "32 bits"),
    "ours": ("ours", "plain"),
    "peer": ("peer", "plain"),
    "bare": ("bare", "plain"),
}
RATIOS = (("16 bits", "peer"), ("feedback", "peer"), ("16 bits", "32 bits"), ("ours", "peer"))
SECONDS, QUICK_SECONDS = 2.0, 0.3
WARM_UP = 5.0
STEPS, QUICK_STEPS = 1500, 60
LEARNING_RATE = 0.2


def contest() -> Contest:
    """Returns the contest of the layers on all sides."""
    return Contest("layers", {"8 layers, batch 16": COLUMNS}, workers=2, ps=2)


def speed_table(found: Found) -> str:
    """Returns a row of rates in examples per second, and one of milliseconds of processor time for a step."""
    ((_, rounds),) = found.items()
    milliseconds = ("ms of processor", *(rounds[name].text("processor", ".0f", BATCH_SIZE * 1e3) for name in COLUMNS))
    return f"{rate_table('examples/s', tuple(COLUMNS), RATIOS, found)}\n\n{aligned(('', *COLUMNS), [milliseconds])}"


def _rule(name: str, dtype: tf.DType, error_feedback: bool) -> RuleChoice:
    return RuleChoice(
        name,
        lambda optimizer, variables: updates.Asynchronous(
            optimizer, variables, transfer_dtype=dtype, error_feedback=error_feedback
        ),
    )


RULES = (
    _rule("32 bits", tf.float32, False),
    _rule("16 bits", tf.bfloat16, False),
    _rule("feedback", tf.bfloat16, True),
)


def accuracies(seeds: int, steps: int, show: Callable[[str], object]) -> dict[str, list[float]]:
    """Trains with each rule and each seed in turn, and returns the held-out accuracies, from 0 to 1, by rule."""
    found: dict[str, list[float]] = {choice.name: [] for choice in RULES}
    with (
        LocalCluster(WORKERS, PS) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver) as strategy,
    ):
        shared = TrainingCluster(strategy)
        for seed in range(seeds):
            for choice in RULES:
                training = Training(shared, choice, NoPauses(), learning_rate=LEARNING_RATE, seed=seed)
                training.train(lambda: training.steps < steps)  # noqa: B023 - called before the next is created
                found[choice.name].append(training.accuracy())
            show(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.4f}" for name, values in found.items()))
    return found


def accuracy_table(found: dict[str, list[float]]) -> str:
    """Returns a row for each rule: the accuracy with each seed, and the mean, in percent."""
    seeds = range(len(next(iter(found.values()))))
    rows = [
        (name, *(f"{100 * value:.2f}" for value in values), f"{100 * statistics.mean(values):.2f}")
        for name, values in found.items()
    ]
    return aligned(("held-out accuracy, %", *(f"seed {seed}" for seed in seeds), "mean"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables."""
    assert __doc__ is not None
    chosen = SpeedArguments("rounding", __doc__.partition("\n")[0], arguments, PARTS)
    figures = {}
    if "speed" in chosen.parts:
        print(f"{machine_line()}, 2 workers, 2 parameter servers, medians of {chosen.repeats}", flush=True)
        seconds, warm_up = (QUICK_SECONDS, 0.0) if chosen.is_quick else (SECONDS, WARM_UP)
        found = contest().measure(chosen.repeats, seconds, warm_up)
        figures["speed"] = plain(found)
        print(speed_table(found), flush=True)
    if "accuracy" in chosen.parts:
        steps = QUICK_STEPS if chosen.is_quick else STEPS
        print(f"{machine_line()}, {WORKERS} workers, {PS} parameter servers, {steps} steps of 32 images", flush=True)
        trained = accuracies(chosen.repeats, steps, lambda line: print(line, flush=True))
        figures["accuracy"] = trained
        print(accuracy_table(trained))
    chosen.write(figures)


if __name__ == "__main__":
    main()
