"""A contestant's process: a command goes in, an answer comes out.

Waiting for an answer ends in time, and no process is left when it is closed.
"""

import json
import pathlib
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.piped_process import PipedProcess

# Far more than a contestant needs to load TensorFlow, connect and trace its functions, in seconds.
PATIENCE = 240.0


class ContestantProcess(PipedProcess):
    """A running `benchmarks.contestants.program`.

    Args:
      workload: one of `WORKLOADS` there.
      side: one of `SIDES` there.
      spec: the addresses of each job.
      log: the file for what it prints.
      patience: the timeout of each answer, in seconds.
    """

    def __init__(
        self,
        workload: str,
        side: str,
        spec: Mapping[str, Sequence[str]],
        log: pathlib.Path,
        *,
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        # The process may report as soon as it has started.
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        spec_text = json.dumps(dict(spec))
        super().__init__(f"{workload}, {side}", "benchmarks.contestants.program", workload, side, spec_text, log=log)

    def wait_connected(self) -> float:
        """Waits until it has connected, and returns how long connecting took, in seconds.

        Raises:
          RuntimeError: it did not connect; the message ends with what it printed.
        """
        found = self._answer()
        if "connected" not in found:
            raise RuntimeError(f"{self!r} did not connect: {found['error']}. It printed:\n{self.tail()}")
        return float(found["connected"])

    def run(self, work: str, seconds: float) -> dict[str, Any]:
        """Runs a round of about `seconds`.

        Returns:
          The answer: `figures`, or the `error`, also where the process hangs or has ended.
        """
        try:
            self.send(json.dumps({"work": work, "seconds": seconds}))
        except BrokenPipeError:
            return {"error": "is gone"}
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            return self._answers.get(timeout=self._patience)
        except queue.Empty:
            # A late answer would be taken for that of the next round.
            self.process.kill()
            return {"error": f"hangs (deadline {self._patience:g} s)"}

    def _on_message(self, message: dict[str, Any]) -> None:
        self._answers.put(message)

    def _on_end(self, code: int) -> None:
        self._answers.put({"error": f"ended with code {code}"})
