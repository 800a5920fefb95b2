"""A contestant's process, as the benchmark sees it: an order goes in, an answer comes out, in time or never.

It promises that waiting for an answer ends, and that no process is left when it is closed.
"""

import json
import pathlib
import queue
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.piped_process import PipedProcess

# A contestant loads TensorFlow and connects; a first round makes and traces what all rounds use. Far more than that.
PATIENCE = 240.0


class ContestantProcess(PipedProcess):
    """A running `benchmarks.contestants.program`.

    Args:
      course: what it is to run, one of `COURSES` there.
      side: how, one of `SIDES` there.
      spec: the addresses of each job.
      log: takes what it prints.
      patience: how long to wait for each answer, in seconds.
    """

    def __init__(
        self,
        course: str,
        side: str,
        spec: Mapping[str, Sequence[str]],
        log: pathlib.Path,
        *,
        patience: float = PATIENCE,
    ) -> None:
        self._patience = patience
        # The process may tell something as soon as it is begun.
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        spec_text = json.dumps(dict(spec))
        super().__init__(f"{course}, {side}", "benchmarks.contestants.program", course, side, spec_text, log=log)

    def wait_connected(self) -> float:
        """Waits until it may begin, and returns how long it took to connect, in seconds.

        Raises:
          RuntimeError: it did not come to that; the message ends with what it printed.
        """
        found = self._answer()
        if "connected" not in found:
            raise RuntimeError(f"{self!r} did not connect: {found['error']}. It printed:\n{self.tail()}")
        return float(found["connected"])

    def run(self, work: str, seconds: float) -> dict[str, Any]:
        """Has it run a round of about so many seconds.

        Returns:
          Its answer: `figures`, or the `error` that it met, also if it hangs.
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
            # An answer that came later would be taken for that of another round.
            self._process.kill()
            return {"error": f"hangs (deadline {self._patience:g} s)"}

    def _take(self, told: dict[str, Any]) -> None:
        self._answers.put(told)

    def _take_end(self, code: int) -> None:
        self._answers.put({"error": f"ended with code {code}"})
