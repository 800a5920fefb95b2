"""Our connection to one run of a server."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Connection:
    """What we made on the server is gone with its run, and with the connection.

    Attributes:
      incarnation: the number that the server drew when it started.
      number: differs from that of every other connection of this cluster.
      since: when it was made, on the `time.monotonic` clock.
    """

    incarnation: int
    number: int
    since: float
