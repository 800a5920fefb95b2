"""`coordinator serve`: one standard TensorFlow server, in this process, until a signal ends it.

Guarantees: the server refuses wrong settings before TensorFlow is loaded, and prints one line when it serves. On
SIGTERM and SIGINT the server ends immediately, with code 0. With `exit_with_parent`, closing its standard input has the
same effect. With `until_client_ends` the server ends with code 0, within some seconds after its client. Lists of
processes show `coordinator worker 0` instead of the command line that all servers share.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import setproctitle

from coordinator.addresses import check_port_is_free, in_address, parse_address
from coordinator.background_thread import BackgroundThread, start_once
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.listening import loopback_of, own_address, reached_only_at
from coordinator.http_server import HttpServer, Request
from coordinator.launch.task_config import TaskConfig

if TYPE_CHECKING:
    import tensorflow as tf

# How long the server may take to answer, in seconds. Kubernetes' probes wait for one second.
_ANSWER_TIMEOUT = 0.5
# How long `close` waits for an answer, in seconds.
_CLOSE_TIMEOUT = 5.0


class Health:
    """Reports a server's health over HTTP: to Kubernetes' probes, and to Prometheus if no client reports.

        GET /healthz    200 if the server answers requests, 503 if not; a JSON object
        GET /metrics    the same and what the process uses, in Prometheus' text format

    `Health` listens immediately, on separate threads. No request changes anything. A server that is still starting is
    reported as not serving. Any number of connections without a request cannot exclude a probe (`http_server.py`). A
    request must name this machine by an address, by `localhost`, or by the host of the server's own address.

    Args:
      config: the server's task.
      port: the port to listen on; 0 for any free port. The attribute is the port in use.
      address: the only IP address to listen at, which is the server's own address; None for all addresses.

    Attributes:
      count_clients: returns how many clients are connected to the server; None until it serves.

    Raises:
      LaunchError: the port is in use, or needs rights that this process does not have.
    """

    def __init__(self, config: TaskConfig, port: int, address: str | None):
        self.count_clients: Callable[[], int] | None = None
        self._config = config
        host = address or ""
        # The import is here because the fork server imports this module, and a process that forks should not load gRPC.
        from coordinator.heartbeat.probes import TaskProbe

        self._probe = TaskProbe(f"{in_address(host) or '127.0.0.1'}:{config.port}")
        if not host and socket.has_dualstack_ipv6():
            # `::` means both IPv6 and IPv4, as for TensorFlow.
            host = "::"
        self._process = psutil.Process()
        own_name = parse_address(config.address).host
        try:
            self._server = HttpServer(host, port, self._reply, name="coordinator-health", names=[own_name])
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it must be from 0 to 65535"
            what = f"{config.name} cannot report its health on port {port}"
            raise LaunchError(f"{what}: {reason}. Give it another --health-port.") from None
        self.port = self._server.port

    def answer(self, path: str) -> tuple[int, str, str]:
        """Returns the status, the content type and the text of an answer."""
        if path not in ("/healthz", "/metrics"):
            return 404, "text/plain; charset=utf-8", "There are /healthz and /metrics.\n"
        is_serving = self.count_clients is not None and self._probe.status(_ANSWER_TIMEOUT) is not None
        clients = self.count_clients() if is_serving and self.count_clients else 0
        if path == "/metrics":
            return 200, "text/plain; version=0.0.4; charset=utf-8", self._metrics(int(is_serving), clients)
        state = {"task": self._config.name, "serving": is_serving, "clients": clients}
        return 200 if is_serving else 503, "application/json", json.dumps(state) + "\n"

    def close(self) -> None:
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
        metrics = [
            ("coordinator_server_serving", "gauge", "1 if the server answers requests.", task, is_serving),
            ("coordinator_server_clients", "gauge", "Clients that are connected.", task, clients),
            ("process_cpu_seconds_total", "counter", "CPU time, in seconds.", "", times.user + times.system),
            ("process_resident_memory_bytes", "gauge", "Resident memory, in bytes.", "", memory.rss),
            ("process_start_time_seconds", "gauge", "Start, in seconds since the epoch.", "", began),
        ]
        form = "# HELP {0} {2}\n# TYPE {0} {1}\n{0}{3} {4}\n"
        return "".join(form.format(*metric) for metric in metrics)


def set_process_title(title: str, name: str) -> None:
    """Sets the process's command line, and its name of at most 15 bytes, as `ps` and `top` show them."""
    # With this variable `setproctitle` cuts a long title instead of overwriting the environment in `/proc/PID/environ`.
    os.environ["SPT_NOENV"] = "1"
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle(name)


class SignalReader:
    """Handles signals on a separate thread, immediately, even while the main thread runs TensorFlow.

    Python runs its own handlers in the main thread, between two instructions of Python code. If a signal arrives just
    before the main thread begins to wait, Python therefore handles the signal only after the wait.

    A `SignalReader` is a context manager for the main thread. Leaving the context restores the former handlers.

    Args:
      numbers: the signals. An ignored signal stays ignored: `nohup`, or a shell for a background job, has set that.
      on_signal: gets each signal that arrives, in the reader's thread.
    """

    def __init__(self, numbers: Collection[signal.Signals], on_signal: Callable[[signal.Signals], None]):
        self._numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._on_signal = on_signal
        self._thread = BackgroundThread("coordinator-signals", self._read)

    def __enter__(self) -> "SignalReader":
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._thread.start()
        self._found_descriptor = signal.set_wakeup_fd(self._writing)
        # Python writes a signal's number to the descriptor only if the signal has a handler.
        self._found_handlers = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._found_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._found_descriptor)
        self._thread.stop()
        os.close(self._writing)
        self._thread.wait_stopped()
        os.close(self._reading)

    def _read(self) -> None:
        while received := os.read(self._reading, 64):
            for number in received:
                if number in self._numbers:
                    self._on_signal(signal.Signals(number))


SERVE_COMMAND = (sys.executable, "-m", "coordinator", "serve", "--exit-with-parent")
SERVED_JOBS = ("worker", "ps")
# The pause between two checks of the client, in seconds.
_CLIENT_INTERVAL = 1.0
# How long a client may take to answer, in seconds.
_CLIENT_TIMEOUT = 0.25
# The exit code of a server that cannot serve, because its task is unknown or its port is taken.
UNUSABLE = 2
# Parameters of mallopt (malloc.h). The first one keeps up to 512 MB of freed memory at the end of each heap. With the
# second one, blocks of up to 32 MB, the maximum, are allocated in heaps instead of separate mappings.
_KEPT_MEMORY = {-1: 512 << 20, -3: 32 << 20}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


def serve(
    environment: MutableMapping[str, str],
    *,
    interface: str | None = None,
    health_port: int | None = None,
    until_client_ends: bool = False,
    exit_with_parent: float | None = None,
    **task: Any,
) -> NoReturn:
    """Runs one server until this process ends.

    Args:
      environment: the environment of this process, with `TF_CONFIG`.
      interface: the IP address of this machine at which the server can be reached. The default is the loopback
        interface if the host of its own address is `localhost` or a loopback address, and every interface otherwise.
      health_port: the port for `Health`.
      until_client_ends: whether to end, with code 0, when a connected client has ended without an error.
      exit_with_parent: end when standard input is closed, or when nothing has arrived there for this many seconds,
        which may be `math.inf`. With None, standard input is not read.
      **task: `job`, `index`, `address` and `devices`, as in `TaskConfig.of_server`.

    Raises:
      ClusterSpecError: the task is unknown, or is not a server's task.
      LaunchError: the server cannot serve, for example because its port is taken.
    """
    if exit_with_parent is not None and not exit_with_parent > 0:
        raise LaunchError(f"--exit-with-parent must be a number of seconds above 0, got {exit_with_parent:g}.")
    config = _served_task(environment, **task)
    own = own_address(interface) if interface else loopback_of(parse_address(config.address).host)
    check_port_is_free(config.name, config.address)
    health = None if health_port is None else Health(config, health_port, own)
    set_process_title(f"coordinator {config.job} {config.index}", f"{config.job}-{config.index}")
    _keep_freed_memory(environment)
    with SignalReader((signal.SIGTERM, signal.SIGINT), lambda _: _end()):
        if exit_with_parent is not None:
            watch = functools.partial(_end_with_standard_input, exit_with_parent)
            # If the watch fails, the server ends too, because it might outlive its parent.
            start_once("coordinator-parent", watch, lambda _: _end())
        load_tensorflow(environment)
        server, reach = _start_reachable(own, config)
        print(f"{serving_line(config)}{reach}", flush=True)
        _serve(server, config, health, until_client_ends=until_client_ends)
    raise AssertionError("a server is joined until this process ends")


def serving_line(config: TaskConfig) -> str:
    """Returns the beginning of the line that a server prints when it serves."""
    return f"coordinator: {config.name} serves on {config.address}"


def _served_task(environment: Mapping[str, str], **task: Any) -> TaskConfig:
    """Returns the task to serve, as the only task of its cluster, from `TF_CONFIG` and arguments of `of_server`."""
    text = environment.get("TF_CONFIG", "")
    if not text.strip() and None in (task.get("job"), task.get("index"), task.get("address")):
        raise ClusterSpecError(
            "TF_CONFIG is not set: give --job, --index and --address, or put the cluster and this task there, as "
            '{"cluster": {"worker": ["host:port"], "ps": ["host:port"]}, "task": {"type": "worker", "index": 0}}.'
        )
    config = TaskConfig.of_server(text, **task)
    if config.job not in SERVED_JOBS:
        jobs = " and ".join(SERVED_JOBS)
        raise ClusterSpecError(
            f"{config.name} is not a server: run your program for it, and `coordinator serve` for jobs {jobs}."
        )
    return config


def _keep_freed_memory(environment: Mapping[str, str]) -> None:
    """Makes glibc keep freed memory, unless the user has configured it.

    Each step copies variables and gradients into new buffers. If the kernel takes back freed memory, it clears each
    page again, and steps of a dense model of 33 MB take a third more processor time.
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in environment):
        # Another C library may not have `mallopt`.
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            for parameter, value in _KEPT_MEMORY.items():
                mallopt(parameter, value)


def _start_server(config: TaskConfig) -> "tf.distribute.Server":
    import tensorflow as tf

    cluster = tf.train.ClusterSpec({config.job: {config.index: config.address}})
    settings: dict[str, Any] = {}
    if config.devices > 1:
        settings["config"] = tf.compat.v1.ConfigProto(device_count={"CPU": config.devices})
    try:
        return tf.distribute.Server(cluster, job_name=config.job, task_index=config.index, protocol="grpc", **settings)
    except tf.errors.OpError as error:
        # Another process may have taken the port while TensorFlow was loaded.
        reason = f"TensorFlow could not start the server: {error.message.partition(chr(10))[0]}"
        raise LaunchError(f"{config.name} cannot serve on {config.address}: {reason}") from None


def _start_reachable(own: str | None, config: TaskConfig) -> "tuple[tf.distribute.Server, str]":
    """Starts a server that can be reached only at the address `own` of this machine, or with None at all addresses.

    Returns the server, and the end of the server's line in the log, which says if every machine can reach the server.
    """
    reason = ""
    if own is None:
        server = _start_server(config)
    else:
        try:
            with reached_only_at(own, config.port):
                server = _start_server(config)
            return server, ""
        except OSError as error:
            reason = f"; the interface cannot be restricted: {error}"
    return server, f", open to every machine that reaches the port{reason}; see docs/security.md"


def _serve(
    server: "tf.distribute.Server", config: TaskConfig, health: "Health | None", *, until_client_ends: bool
) -> None:
    if health is not None or until_client_ends:
        from coordinator.ps_strategy.membership.clients import ServedClients

        clients = ServedClients(server.target, config.name, _CLIENT_TIMEOUT)
        if health is not None:
            health.count_clients = lambda: len(clients.living())
            print(f"coordinator: {config.name} answers /healthz and /metrics on port {health.port}", flush=True)
        if until_client_ends:
            pause = threading.Event()
            while not clients.have_ended():
                pause.wait(_CLIENT_INTERVAL)
            print(f"coordinator: {config.name} ends: its client has ended", flush=True)
            _end()
    server.join()


def load_tensorflow(environment: MutableMapping[str, str]) -> None:
    """Loads TensorFlow in this process, unless it is already loaded, with the environment that a server needs.

    Keras is left out, because no server uses it. TensorFlow loads Keras last, and Keras loads scikit-learn and
    Matplotlib. Together they take half of the loading time.
    """
    # TensorFlow reads this variable for each call. The process that started this one may have set another value. With
    # "false", a call to a dead server would wait for the server instead of failing.
    environment["GRPC_FAIL_FAST"] = "use_caller"
    # gRPC reads this variable with each connection. Otherwise servers would use `http_proxy` for each other, or fail.
    environment.setdefault("grpc_proxy", "")
    # With its former default, gRPC before TensorFlow 2.20 makes an epoll instance whenever it likes. One that it makes
    # while `reached_only_at` replaces the listening socket lacks the socket, and the server then never answers.
    environment.setdefault("GRPC_POLL_STRATEGY", "epoll1")
    left_out = [package for package in ("keras", "tf_keras") if package not in sys.modules]
    # `import` treats None as a package that is not installed.
    sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]
    try:
        import tensorflow as tf  # noqa: F401 - for what it does
    finally:
        for package in left_out:
            del sys.modules[package]


def _end_with_standard_input(timeout: float) -> NoReturn:
    # If a fork server started this process, standard input is a socket, which may be reset instead of closed.
    with contextlib.suppress(ConnectionResetError):
        limit = None if timeout == math.inf else timeout
        while select.select([0], [], [], limit)[0] and os.read(0, 4096):
            pass
    _end()


def _end() -> NoReturn:
    # TensorFlow has no orderly end for a server with clients, and nothing in this process needs an orderly end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
