"""`coordinator serve`: one standard TensorFlow server, in this process, until a signal ends it.

It promises to refuse what cannot work before TensorFlow is loaded, to print one line when it serves, and to end at
once, with code 0, on SIGTERM, on SIGINT and, with `exit_with_parent`, when its standard input is closed.
"""

import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping
from typing import NoReturn

from coordinator.addresses import check_port_is_free, parse_address
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.listening import Network, accept_only_at, networks_of, own_network
from coordinator.launch.signal_reader import SignalReader
from coordinator.launch.task_config import TaskConfig

SERVE_COMMAND = (sys.executable, "-m", "coordinator", "serve", "--exit-with-parent")
SERVED_JOBS = ("worker", "ps")
# The exit code of a server that cannot serve: its task is unknown or its port is taken.
UNUSABLE = 2


def serve(
    environment: MutableMapping[str, str],
    *,
    job: str | None = None,
    index: int | None = None,
    interface: str | None = None,
    exit_with_parent: bool = False,
) -> int:
    """Runs the server that `TF_CONFIG` describes, until this process ends.

    Args:
      environment: the environment of this process, with `TF_CONFIG`.
      job: the job, in place of that of `TF_CONFIG`'s task.
      index: the index, in place of that of `TF_CONFIG`'s task.
      interface: the IP address of this machine at which the server can be reached. By default that is the loopback
        interface if the host of its own address is `localhost` or a loopback address, and every interface otherwise.
      exit_with_parent: end when standard input is closed.

    Returns:
      Exit code 2 if it cannot serve, after a line on standard error that says why: `TF_CONFIG` is missing or wrong, or
      names a task that is not a server, the interface is no address of this machine, or another process listens on the
      port.
    """
    try:
        config = served_task(environment, job=job, index=index)
        networks = own_network(interface) if interface else networks_of(parse_address(config.address).host)
        check_port_is_free(config.name, config.address)
    except (ClusterSpecError, LaunchError) as error:
        print(f"coordinator serve: {error}", file=sys.stderr)
        return UNUSABLE
    _name_process(config)
    with SignalReader((signal.SIGTERM, signal.SIGINT), lambda _: _end()):
        if exit_with_parent:
            threading.Thread(target=_end_with_standard_input, name="coordinator-parent", daemon=True).start()
        load_tensorflow(environment)
        import tensorflow as tf

        cluster = tf.train.ClusterSpec({job: dict(tasks) for job, tasks in config.cluster.items()})
        try:
            server = tf.distribute.Server(cluster, job_name=config.job, task_index=config.index, protocol="grpc")
        except tf.errors.OpError as error:
            # Another process may have taken the port while TensorFlow was loaded.
            reason = f"TensorFlow could not start the server: {error.message.partition(chr(10))[0]}"
            print(f"coordinator serve: {config.name} cannot serve on {config.address}: {reason}", file=sys.stderr)
            return UNUSABLE
        print(f"coordinator: {config.name} serves on {config.address}{_reach(networks, config.address)}", flush=True)
        server.join()
    raise AssertionError("A server is joined for ever.")


def served_task(environment: MutableMapping[str, str], *, job: str | None, index: int | None) -> TaskConfig:
    """Returns the task to serve, in its cluster of servers.

    Raises:
      ClusterSpecError: `TF_CONFIG` is missing or wrong, or names a task that is not a server.
    """
    text = environment.get("TF_CONFIG", "")
    if not text.strip():
        raise ClusterSpecError(
            "TF_CONFIG is not set: put the cluster and this task there, as "
            '{"cluster": {"worker": ["host:port"], "ps": ["host:port"]}, "task": {"type": "worker", "index": 0}}.'
        )
    config = TaskConfig.from_json(text, job=job, index=index)
    if config.job not in SERVED_JOBS:
        raise ClusterSpecError(
            f"{config.name} is not a server: run your program for it, and `coordinator serve` for jobs "
            f"{' and '.join(SERVED_JOBS)}."
        )
    # An evaluator is no server: TensorFlow would wait for it to answer.
    return config.without("evaluator")


def _reach(networks: tuple[Network, ...] | None, address: str) -> str:
    """Lets the server be reached at some addresses only; returns what is to be said about it."""
    if networks is not None:
        try:
            accept_only_at(networks, parse_address(address).port)
            return ""
        except OSError as error:
            reason = f"; the interface cannot be restricted: {error}"
    else:
        reason = ""
    return f", open to every machine that reaches the port{reason}; see docs/security.md"


def load_tensorflow(environment: MutableMapping[str, str]) -> None:
    """Loads TensorFlow as a server needs it, without Keras, unless it is loaded.

    Args:
      environment: the environment of this process.
    """
    # Read when TensorFlow is loaded: without it, calls to a dead server wait for it instead of failing.
    # The client that started this process may have set another value, for itself.
    environment["GRPC_FAIL_FAST"] = "use_caller"
    with _left_out("keras", "tf_keras"):
        import tensorflow as tf  # noqa: F401 - for what it does


@contextlib.contextmanager
def _left_out(*packages: str) -> Iterator[None]:
    """A scope in which packages that are not loaded cannot be.

    TensorFlow loads Keras last, if it can, and Keras loads scikit-learn and Matplotlib, if they are installed: half of
    the time that loading takes. A server uses none of it.
    """
    absent = [package for package in packages if package not in sys.modules]
    # What `import` takes for a package that is not installed.
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for package in absent:
            del sys.modules[package]


def _name_process(config: TaskConfig) -> None:
    """Names the process after its task, as lists of processes show all servers with one command line. Linux only."""
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/comm").write_text(f"{config.job}-{config.index}")


def _end_with_standard_input() -> NoReturn:
    # It is a socket where a fork server started this process, which may be reset instead of closed.
    with contextlib.suppress(ConnectionResetError):
        while os.read(0, 4096):
            pass
    _end()


def _end() -> NoReturn:
    # TensorFlow has no orderly end for a server with clients; nothing here needs one.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
