"""A progress bar of epochs."""

from typing import Any

from coordinator.background_thread import BackgroundThread

# In seconds.
_INTERVAL = 0.2


class ProgressBar:
    """A context in which a thread keeps a bar of `tqdm` at the number of ranges that are done; it goes back as they do.

    Args:
      epochs: whose ranges are shown.
      settings: keyword arguments of `tqdm.tqdm`, such as `desc` or `file`.
    """

    def __init__(self, epochs: Any, settings: dict[str, Any]) -> None:
        self._epochs = epochs
        self._settings = settings
        self._thread = BackgroundThread("coordinator-progress", self._keep_showing)

    def __enter__(self) -> Any:
        """Shows the bar, and returns it.

        Raises:
          ImportError: `tqdm` is not installed.
        """
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("epochs.progress() needs tqdm: pip install 'coordinator-tf[data]'.") from error
        found = self._epochs.statistics()
        self._bar = tqdm(**{"total": found.ranges, "initial": found.done, "unit": "range", **self._settings})
        self._thread.start()
        return self._bar

    def __exit__(self, *_: object) -> None:
        self._thread.stop()
        self._thread.wait_stopped()
        self._show()
        self._bar.close()

    def _keep_showing(self) -> None:
        while not self._thread.stopping.wait(_INTERVAL):
            self._show()

    def _show(self) -> None:
        self._bar.update(self._epochs.statistics().done - self._bar.n)
        self._bar.refresh()
