"""What a process that was forked from the client leaves alone: the strategy, its servers and its markers.

A child that ends in order, such as by `sys.exit`, leaves the `with` blocks of its parent and runs the finalizers that
it has inherited. The threads and connections of the parent do not exist there.
"""

import os
from collections.abc import Callable


def only_here(call: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that makes a call in this process, and does nothing in one that was forked from it."""
    owner = os.getpid()

    def guarded() -> None:
        if os.getpid() == owner:
            call()

    return guarded


def refuse_forked(owner: int, what: str) -> None:
    """Raises RuntimeError if this process was forked from the one that made something.

    Args:
      owner: the id of the process that made it.
      what: for the message.
    """
    if os.getpid() != owner:
        raise RuntimeError(
            f"{what} belongs to process {owner}, from which this process ({os.getpid()}) was forked without its "
            "threads and connections. Use it there; or start processes by `spawn`, with "
            'multiprocessing.get_context("spawn").'
        )
