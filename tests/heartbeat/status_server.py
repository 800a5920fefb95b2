"""A server that answers probes, and nothing else."""

from collections.abc import Callable
from concurrent import futures

import grpc

METHOD = "/tensorflow.WorkerService/GetStatus"
CPU = "/job:worker/replica:0/task:0/device:CPU:0"


def device(name: str, incarnation: int) -> bytes:
    """One device as it is on the wire, with a field that the probe does not read (its type, field 2)."""
    fields = b"\x0a" + bytes([len(name)]) + name.encode() + b"\x12\x03CPU" + b"\x31" + incarnation.to_bytes(8, "little")
    return b"\x0a" + bytes([len(fields)]) + fields


class StatusServer(grpc.GenericRpcHandler):
    """A server with one method, on a given address."""

    def __init__(self, address: str, reply: Callable[[], bytes]):
        self._reply = reply
        self._threads = futures.ThreadPoolExecutor(4)
        self._server = grpc.server(self._threads, handlers=[self])
        assert self._server.add_insecure_port(address)
        self._server.start()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: self._reply())

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown()

    def __enter__(self) -> "StatusServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
