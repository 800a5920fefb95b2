"""Servers that answer probes' status requests like TensorFlow's servers, and start in a moment.

python coordinator/testing/status_server.py ADDRESS INCARNATION    runs until its standard input is closed
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent import futures

import grpc

METHOD = "/tensorflow.WorkerService/GetStatus"
CPU = "/job:worker/replica:0/task:0/device:CPU:0"


def encoded_device(name: str, incarnation: int) -> bytes:
    """Encodes a device for a reply, with a field that probes do not read (its type, field 2)."""
    fields = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12\x03CPU" + b"\x31" + incarnation.to_bytes(8, "little")
    return b"\x0a" + bytes([len(fields)]) + fields


class StatusService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers only status requests, on threads of this process, until the context manager is left.

    The service listens at `address` (`host:port`). `reply` returns the bytes of an answer; `options` are gRPC's.
    """

    def __init__(self, address: str, reply: Callable[[], bytes], options: Sequence[tuple[str, int]] = ()):
        self._reply = reply
        self._threads = futures.ThreadPoolExecutor(4, "status-service")
        self._server = grpc.server(self._threads, handlers=[self], options=options)
        self._server.add_insecure_port(address)
        self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda *_: self._reply())

    def join(self) -> None:
        """Waits until the service is closed."""
        self._server.wait_for_termination()

    def __enter__(self) -> "StatusService":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown()


class StatusServer:
    """A process that answers only status requests, like a TensorFlow worker. It runs no functions.

    Tests use it to freeze, end or restart a server. It ends when the context manager is left, and with this process.

    Args:
      address: `host:port` to listen at.
      incarnation: the number that the server reports. A different number means that the server was restarted.

    Raises:
      RuntimeError: the server did not start, for example because the port is in use.
    """

    def __init__(self, address: str, incarnation: int = 1) -> None:
        self.address = address
        command = [sys.executable, __file__, address, str(incarnation)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        if self._process.stdout is None or self._process.stdout.readline() != b"serves\n":
            self.kill()
            raise RuntimeError(f"No server started at {address}; it says above why.")

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def freeze(self) -> None:
        """Stops the process without ending it: its connections stay open, and it does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues a frozen process."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process, frozen or not; returns when it is gone."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> "StatusServer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self.kill()


def _serve(address: str, incarnation: str) -> None:
    reply = encoded_device(CPU, int(incarnation))
    # Otherwise two processes could listen on the port.
    with StatusService(address, lambda: reply, [("grpc.so_reuseport", 0)]):
        sys.stdout.write("serves\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
