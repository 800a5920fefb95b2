"""What is trained in virtual time. As it is here, nothing is: for when only time is of interest."""

from typing import Any

from coordinator.simulation.simulated_worker import SimulatedWorker


class SimulatedModel:
    """The model on the parameter servers, and the workers' copies of it. This one does nothing."""

    def pull(self, worker: SimulatedWorker) -> None:
        """The worker's copy becomes the shared model."""

    def apply(self, worker: SimulatedWorker, scale: float) -> None:
        """Applies the gradient of a worker's copy to the shared model, with the learning rate times a scale."""

    def apply_to_own(self, worker: SimulatedWorker) -> None:
        """Applies the same gradient to the worker's copy, too."""

    def add(self, worker: SimulatedWorker) -> None:
        """Takes the gradient of a worker's copy to those that wait for an update."""

    def apply_mean(self) -> None:
        """Applies the mean of those that wait."""

    def gradient(self, worker: SimulatedWorker) -> Any:
        """The gradient of a worker's copy, which `apply_gradient` applies later."""

    def apply_gradient(self, gradient: Any) -> None:
        """Applies a gradient that was taken before to the shared model."""

    def average(self, worker: SimulatedWorker) -> None:
        """Averages the worker's copy with those of the others; the mean becomes the shared model."""

    def train_own(self, worker: SimulatedWorker) -> None:
        """Applies the gradient of a worker's copy to it, after what was averaged has come back."""

    def leave_out(self, worker: SimulatedWorker) -> None:
        """The worker's copy is no more."""

    def note_push(self, now: float) -> None:
        """A gradient was pushed, at a time in seconds."""
