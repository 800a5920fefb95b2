"""Sidecar evaluation: a process of its own evaluates the checkpoints that training writes.

The names below are imported when they are first used. `results`, `latest_result`, `best_result`,
`mark_training_started` and `mark_training_finished` cost no TensorFlow import, so that a training client, a
dashboard or a shell script may call them at any time.
"""

from typing import TYPE_CHECKING

__all__ = [
    "EvaluationResult",
    "SidecarEvaluator",
    "best_result",
    "latest_result",
    "mark_training_finished",
    "mark_training_started",
    "results",
]

if TYPE_CHECKING:
    from coordinator.evaluation.best_checkpoint import best_result
    from coordinator.evaluation.evaluation_result import EvaluationResult
    from coordinator.evaluation.results_file import latest_result, results
    from coordinator.evaluation.sidecar_evaluator import SidecarEvaluator
    from coordinator.evaluation.training_marker import mark_training_finished, mark_training_started
else:
    # Hidden from type checkers, which would otherwise accept every misspelt name as an attribute.
    _MODULE_OF_NAME = {
        "EvaluationResult": "evaluation_result",
        "SidecarEvaluator": "sidecar_evaluator",
        "best_result": "best_checkpoint",
        "latest_result": "results_file",
        "mark_training_finished": "training_marker",
        "mark_training_started": "training_marker",
        "results": "results_file",
    }

    def __getattr__(name):
        from importlib import import_module

        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}.")
        return getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
