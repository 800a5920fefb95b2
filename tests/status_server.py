"""A process that answers probes as a TensorFlow server does, and that tests may freeze."""

import signal
import subprocess
import sys
from concurrent import futures

import grpc

METHOD = "/tensorflow.WorkerService/GetStatus"
CPU = "/job:worker/replica:0/task:0/device:CPU:0"


def device(name: str, incarnation: int) -> bytes:
    """One device as it is on the wire, with a field that the probe does not read (its type, field 2)."""
    fields = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12\x03CPU" + b"\x31" + incarnation.to_bytes(8, "little")
    return b"\x0a" + bytes([len(fields)]) + fields


class StatusServer:
    """A server process on a given address. It ends when the process of the test does.

    Args:
      address: `host:port`.
      incarnation: the incarnation that it reports.
    """

    def __init__(self, address: str, incarnation: int = 1) -> None:
        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, __file__, address, str(incarnation)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"serves\n"

    @property
    def pid(self) -> int:
        return self._process.pid

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> "StatusServer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self.kill()


class _StatusService(grpc.GenericRpcHandler):
    def __init__(self, reply: bytes) -> None:
        self._reply = reply

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._reply)


def main(address: str, incarnation: str) -> None:
    service = _StatusService(device(CPU, int(incarnation)))
    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[service], options=[("grpc.so_reuseport", 0)])
    assert server.add_insecure_port(address)
    server.start()
    sys.stdout.write("serves\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
