"""The dashboard of a strategy: a page that shows what happens, while it does.

    coordinator-dashboard            twice a second: counts and events -> `Aggregator` -> snapshot -> `Publisher`
    coordinator-dashboard-servers    while it is watched: asks the parameter servers and the update rules
    coordinator-dashboard-accept     takes connections (`PageServer`)
    coordinator-dashboard-request    one for each request that is answered

It promises that training does not wait for it, and that `close` ends its threads; it waits 5 s for a server at most.
"""

import contextlib
import dataclasses
import logging
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from coordinator.addresses import PageAddress
from coordinator.background_thread import BackgroundThread
from coordinator.dashboard.aggregator import Aggregator
from coordinator.dashboard.page_server import PageServer
from coordinator.dashboard.publisher import Publisher
from coordinator.dashboard.snapshot import RuleRow
from coordinator.dashboard.usage import ServerUsage
from coordinator.events.event_stream import EventStream
from coordinator.statistics import ClusterStatistics

_logger = logging.getLogger("coordinator")

# Between two snapshots, in seconds.
_INTERVAL, _INTERVAL_UNWATCHED = 0.5, 1.0
# Between two polls of the servers, in seconds.
_POLL_INTERVAL = 2.0
# How long `close` waits for a connection or a server that does not answer, in seconds.
_CLOSE_TIMEOUT = 5.0


@dataclasses.dataclass(frozen=True)
class Sources:
    """Where the dashboard reads what it shows. None of these may keep the strategy alive.

    Attributes:
      statistics: returns the counts of the cluster, at once.
      events: has the strategy's events.
      usage: asks the parameter servers what they use, which may take seconds.
      rules: asks for the counters of the update rules, which may take seconds.
    """

    statistics: Callable[[], ClusterStatistics]
    events: EventStream
    usage: Callable[[], Sequence[ServerUsage]]
    rules: Callable[[], Sequence[RuleRow]]


class Dashboard:
    """Serves a page about a strategy until it is closed.

    Args:
      address: where to listen.
      sources: what it shows.

    Attributes:
      url: of the page, with its token.

    Raises:
      LaunchError: it cannot listen there.
    """

    def __init__(self, address: PageAddress, sources: Sources) -> None:
        self._sources = sources
        program = pathlib.PurePath(sys.argv[0]).name if sys.argv else ""
        self._aggregator = Aggregator(time.time(), program)
        self._usage: Sequence[ServerUsage] = ()
        self._rules: Sequence[RuleRow] = ()
        self._next_event = 0
        self._publisher = Publisher(self._aggregator.snapshot(time.time(), sources.statistics()))
        self._server = PageServer(address, self._publisher)
        self.url = self._server.url
        self._publishing = BackgroundThread("coordinator-dashboard", self._publish)
        self._polling = BackgroundThread("coordinator-dashboard-servers", self._poll_servers)
        self._publishing.start()
        self._polling.start()
        if not self._server.is_loopback:
            _logger.warning(
                "The dashboard listens at %s and can be reached from other machines, unencrypted, by those who have "
                "its token.",
                self._server.host,
            )

    def close(self) -> None:
        """Ends the page and all threads."""
        self._publishing.stop()
        self._polling.stop()
        self._publishing.wait_stopped()
        try:
            # What happened last is shown too.
            self._publish_once()
        finally:
            self._publisher.close()
            self._server.close(_CLOSE_TIMEOUT)
            self._polling.wait_stopped(_CLOSE_TIMEOUT)

    def _publish(self) -> None:
        errors = _ErrorLog("The dashboard could not show what is new; it keeps trying.")
        while not self._publishing.stopping.wait(_INTERVAL if self._publisher.is_watched else _INTERVAL_UNWATCHED):
            with errors.logged():
                self._publish_once()

    def _publish_once(self) -> None:
        events, self._next_event, dropped = self._sources.events.since(self._next_event)
        now = time.time()
        self._aggregator.add(events, dropped, now)
        self._aggregator.add_usage(self._usage)
        self._publisher.publish(self._aggregator.snapshot(now, self._sources.statistics(), self._rules))

    def _poll_servers(self) -> None:
        errors = _ErrorLog("The dashboard could not read the servers' usage and the rules' counters; it keeps trying.")
        while not self._polling.stopping.wait(_POLL_INTERVAL if self._usage else _INTERVAL):
            if not self._publisher.is_watched:
                continue
            with errors.logged():
                self._usage = self._sources.usage()
                self._rules = self._sources.rules()


class _ErrorLog:
    """Logs errors of what is repeated; one that comes again and again only once.

    Args:
      message: is logged with each error.
    """

    def __init__(self, message: str) -> None:
        self._message = message
        self._latest = ""

    @contextlib.contextmanager
    def logged(self) -> Iterator[None]:
        """Logs an error of the block, and goes on."""
        try:
            yield
            self._latest = ""
        except Exception as error:
            if repr(error) != self._latest:
                self._latest = repr(error)
                _logger.exception(self._message)
