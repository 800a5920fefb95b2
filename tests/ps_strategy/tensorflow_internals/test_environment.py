"""Tests of the environment variables that a client sets for TensorFlow and gRPC, and that these read them."""

import mmap
import os
import pathlib

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals import process


@pytest.mark.parametrize("proxy", [None, "http://proxy:3128"])
def test_the_environment_is_set_in_a_scope_and_restored_after_it(monkeypatch, proxy):
    before = {
        "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": None,
        "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": None,
        "GRPC_FAIL_FAST": "use_caller",
        # A proxy is used if it is meant for gRPC.
        "grpc_proxy": proxy,
    }
    for name, value in before.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with process.client_environment():
        assert [os.environ[name] for name in before] == ["False", "True", "true", proxy or ""]
    assert {name: os.environ.get(name) for name in before} == before


@pytest.mark.parametrize(
    ("readers", "names"),
    [
        ("*.so*", ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "GRPC_FAIL_FAST", "grpc_proxy"]),
        ("python/eager/context.py", ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"]),
    ],
)
def test_tensorflow_and_grpc_read_the_environment_variable(readers, names):
    missing = set(names)
    for path in pathlib.Path(tf.sysconfig.get_lib()).glob(readers):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            missing -= {name for name in missing if content.find(name.encode()) >= 0}
    assert not missing
