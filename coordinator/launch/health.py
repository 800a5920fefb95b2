"""Answers over HTTP how a server is: for Kubernetes' probes, and for Prometheus where no client reports.

    GET /healthz    200 if the server answers requests, 503 if not; a JSON object
    GET /metrics    the same and what the process uses, in Prometheus' text format

It changes nothing, whatever is asked. While the server starts, it is said not to serve. Connections that send no
request, however many, keep no probe out (`http_server.py`). A request must name this machine by an address, by
`localhost`, or by the host of the server's own address.
"""

import json
import socket
from collections.abc import Callable
from http import HTTPStatus

import psutil

from coordinator.addresses import in_address, parse_address
from coordinator.errors import LaunchError
from coordinator.heartbeat.task_probe import TaskProbe
from coordinator.http_server import HttpServer, Request
from coordinator.launch.task_config import TaskConfig

# How long the server may take to answer, in seconds. Kubernetes' probes wait for one second.
_ANSWER_TIMEOUT = 0.5
# How long `close` waits for an answer, in seconds.
_CLOSE_TIMEOUT = 5.0


class Health:
    """The HTTP server, on separate threads. It listens at once.

    Args:
      config: the task of the server that it answers for.
      port: on which it listens; 0 for any that is free.
      address: the IP address at which the server can be reached; None for everywhere. It can be reached there too.

    Attributes:
      port: on which it listens.
      count_clients: returns how many clients are connected to the server; None until it serves.

    Raises:
      LaunchError: the port is in use, or needs rights that this process does not have.
    """

    def __init__(self, config: TaskConfig, port: int, address: str | None):
        self.count_clients: Callable[[], int] | None = None
        self._config = config
        host = address or ""
        self._probe = TaskProbe(f"{in_address(host) or '127.0.0.1'}:{config.port}")
        if not host and socket.has_dualstack_ipv6():
            # As TensorFlow does: both IPv6 and IPv4.
            host = "::"
        self._process = psutil.Process()
        own_name = parse_address(config.address).host
        try:
            self._server = HttpServer(host, port, self._reply, name="coordinator-health", names=[own_name])
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it must be from 0 to 65535"
            raise LaunchError(
                f"{config.name} cannot report its health on port {port}: {reason}. Give it another --health-port."
            ) from None
        self.port = self._server.port

    def answer(self, path: str) -> tuple[int, str, str]:
        """Returns the status, the type and the text of the answer to a request."""
        if path not in ("/healthz", "/metrics"):
            return 404, "text/plain; charset=utf-8", "There are /healthz and /metrics.\n"
        is_serving = self.count_clients is not None and self._probe.status(_ANSWER_TIMEOUT) is not None
        clients = self.count_clients() if is_serving and self.count_clients else 0
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics(int(is_serving), clients)
        state = {"task": self._config.name, "serving": is_serving, "clients": clients}
        return 200 if is_serving else 503, "application/json", json.dumps(state) + "\n"

    def close(self) -> None:
        """Answers no more."""
        self._server.close(_CLOSE_TIMEOUT)
        self._probe.close()

    def _reply(self, request: Request) -> None:
        code, kind, text = self.answer(request.path.partition("?")[0])
        request.send(HTTPStatus(code), kind, text.encode())

    def _metrics(self, is_serving: int, clients: int) -> str:
        with self._process.oneshot():
            times, memory = self._process.cpu_times(), self._process.memory_info()
            began = self._process.create_time()
        task = f'{{task="{self._config.name}"}}'
        return "".join(
            [
                _metric("coordinator_server_serving", "gauge", "1 if the server answers requests.", is_serving, task),
                _metric("coordinator_server_clients", "gauge", "Clients that are connected.", clients, task),
                _metric("process_cpu_seconds_total", "counter", "CPU time, in seconds.", times.user + times.system),
                _metric("process_resident_memory_bytes", "gauge", "Resident memory, in bytes.", memory.rss),
                _metric("process_start_time_seconds", "gauge", "Start, in seconds since the epoch.", began),
            ]
        )


def _metric(name: str, kind: str, text: str, value: float, labels: str = "") -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{labels} {value}\n"
