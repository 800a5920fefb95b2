"""A package `tensorflow` with just what `coordinator serve` uses, so that a server starts in a moment.

It listens at every address and answers probes as the real one does, and prints some of its environment, and
`FAKE_PRINTS`. A task named in `FAKE_BROKEN` fails to start, as a real one may.
"""

from pathlib import Path

# The real one may start threads on another machine: then no process is forked, and each server is a fresh process.
STARTS_A_THREAD = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"

_SOURCE = """
import os, sys, time, types
from coordinator.testing.status_server import StatusService, encoded_device

class ClusterSpec(dict):
    pass

class Server:
    def __init__(self, cluster, *, job_name, task_index, protocol):
        assert protocol == "grpc" and "evaluator" not in cluster and os.environ["GRPC_FAIL_FAST"] == "use_caller"
        assert os.environ["GRPC_POLL_STRATEGY"] == "epoll1"
        if f"{job_name}-{task_index}" in os.environ.get("FAKE_BROKEN", "").split():
            raise RuntimeError("the fake server fails as requested")
        print({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TF_CPP_MIN_LOG_LEVEL")})
        sys.stderr.write(os.environ.get("FAKE_PRINTS", ""))
        device = encoded_device(f"/job:{job_name}/replica:0/task:{task_index}/device:CPU:0", time.time_ns())
        self._service = StatusService("[::]:" + cluster[job_name][task_index].rpartition(":")[2], lambda: device)

    def join(self):
        self._service.join()

errors = types.SimpleNamespace(OpError=ConnectionError)
train = types.SimpleNamespace(ClusterSpec=ClusterSpec)
distribute = types.SimpleNamespace(Server=Server)
"""


def write_fake_tensorflow(folder: Path, *, begin: str = "") -> str:
    """Writes the package, which begins with this; returns the folder to put on `PYTHONPATH`."""
    package = folder / "tensorflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(begin + _SOURCE)
    return str(folder)
