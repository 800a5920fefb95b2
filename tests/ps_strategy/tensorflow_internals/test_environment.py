"""Tests of the environment variables that a client sets for TensorFlow and gRPC, and that these read them."""

import mmap
import os
import pathlib

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals import process


def test_the_environment_is_set_in_a_scope_and_restored_after_it(monkeypatch):
    names = ("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "GRPC_FAIL_FAST")
    for name in names[:2]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRPC_FAIL_FAST", "use_caller")
    with process.client_environment():
        assert [os.environ[name] for name in names] == ["False", "True", "true"]
    assert [os.environ.get(name) for name in names] == [None, None, "use_caller"]


@pytest.mark.parametrize(("own", "inside"), [(None, ""), ("http://proxy:3128", "http://proxy:3128")])
def test_a_proxy_is_used_if_it_is_meant_for_grpc(monkeypatch, own, inside):
    name = "grpc_proxy"
    monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv(name, own)
    with process.client_environment():
        assert os.environ[name] == inside
    assert os.environ.get(name) == own


@pytest.mark.parametrize(
    ("name", "readers"),
    [
        ("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "*.so*"),
        ("GRPC_FAIL_FAST", "*.so*"),
        ("grpc_proxy", "*.so*"),
        ("TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "python/eager/context.py"),
    ],
)
def test_tensorflow_and_grpc_read_the_environment_variable(name, readers):
    paths = pathlib.Path(tf.sysconfig.get_lib()).glob(readers)
    assert any(is_written_in(path, name.encode()) for path in paths)


def is_written_in(path, text):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0
