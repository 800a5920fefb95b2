"""What an evaluator asks of the thing that it evaluates: take a checkpoint's values, and say how long it trained."""

from collections.abc import Iterable
from typing import Any, Protocol

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.tensorflow_checkpoint import SavedVariable


class CheckpointLoader(Protocol):
    """Loads checkpoints into one object."""

    def require_variables(self) -> None:
        """Raises `EvaluationError` if the object has no variables that a checkpoint could be loaded into."""

    def load(self, checkpoint: CheckpointFile, path: str) -> int:
        """Loads a checkpoint; afterwards every variable holds the trained value.

        Args:
          checkpoint: which one; messages name it.
          path: where to read it: its own path, or that of a copy.

        Returns:
          The number of training steps behind the checkpoint.

        Raises:
          EvaluationError: the checkpoint does not fit the object, or holds no counter of training steps.
          tf.errors.OpError, OSError, IndexError, KeyError: its files cannot be read, now.
        """


def require_step(step: int | None, path: str) -> int:
    """The step that was found in the checkpoint at `path`.

    Raises:
      EvaluationError: none was.
    """
    if step is None:
        raise EvaluationError(
            f"The checkpoint {path!r} holds no counter of training steps, so its metrics cannot be placed. Save the "
            "optimizer with the model, whose `iterations` are such a counter, or a counter of your own: "
            "tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)."
        )
    return step


def require_match(
    variables: Iterable[tuple[str, Any]], saved: dict[int, SavedVariable], path: str, names: list[str]
) -> None:
    """Checks that a checkpoint holds each variable, in its shape.

    Args:
      variables: (name, variable) pairs.
      saved: what the checkpoint holds, by `id(variable)`.
      path: the checkpoint, for messages.
      names: the names of the objects at the checkpoint's root, for messages.

    Raises:
      EvaluationError: one is missing or has another shape.
    """
    for name, variable in variables:
        if id(variable) not in saved:
            raise EvaluationError(
                f"The checkpoint {path!r} holds no value for the variable {name!r}; it holds {names} at its root. "
                "Evaluate the model that was trained, saved under the name 'model', or pass as model a "
                "tf.train.Checkpoint with the names under which training saves."
            )
        shape = tuple(variable.shape)
        if shape != saved[id(variable)].shape:
            raise EvaluationError(
                f"The variable {name!r} has shape {shape} in the evaluator and {saved[id(variable)].shape} in the "
                f"checkpoint {path!r}. Build the evaluator's model as the trained one was built."
            )
