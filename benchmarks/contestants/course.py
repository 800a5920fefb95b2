"""What contestants are made to run, in rounds."""

from typing import Protocol


class Course(Protocol):
    """Made with a `Side` in the contestant's process."""

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """Runs one round of the named work, of about so many seconds, and returns its figures by name."""
