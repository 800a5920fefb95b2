"""The environment of a process that a benchmark measures."""

import os

_UNSET = ("TF_CONFIG", "GRPC_FAIL_FAST", "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE")


def client_environment() -> dict[str, str]:
    """That of this process, with nothing in it that would favour a side."""
    inherited = {name: value for name, value in os.environ.items() if name not in _UNSET}
    return {"TF_CPP_MIN_LOG_LEVEL": "2", **inherited, "CUDA_VISIBLE_DEVICES": ""}
