"""Tests of the environment, the logs and the profiles of the client's process."""

import logging
import mmap
import os
import pathlib

import pytest
import tensorflow as tf
from tensorflow.python.profiler.internal import _pywrap_profiler

from coordinator.ps_strategy.tensorflow_internals import process
from coordinator.ps_strategy.tensorflow_internals.process import minimum_level, profiles_reported, quiet_logs
from coordinator.versions import off
from tests.program_runner import ProgramRunner


def test_the_environment_is_set_in_a_scope_and_restored_after_it(monkeypatch):
    before = {
        "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": None,
        "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": None,
        "GRPC_FAIL_FAST": "use_caller",
        # A proxy is used if it is meant for gRPC.
        "grpc_proxy": "http://proxy:3128",
        "GRPC_POLL_STRATEGY": None,
    }
    for name, value in before.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with process.client_environment():
        assert [os.environ[name] for name in before] == ["False", "True", "true", "http://proxy:3128", "epoll1"]
    assert {name: os.environ.get(name) for name in before} == before


def test_tensorflow_and_grpc_read_the_environment_variable():
    for readers, missing in {
        "*.so*": {"TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "GRPC_FAIL_FAST", "grpc_proxy"},
        "python/eager/context.py": {"TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"},
    }.items():
        for path in pathlib.Path(tf.sysconfig.get_lib()).glob(readers):
            with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                missing -= {name for name in missing if content.find(name.encode()) >= 0}
        assert not missing


FATAL = 3


@pytest.fixture
def default_level(monkeypatch: pytest.MonkeyPatch) -> int:
    """As in a program whose user has decided nothing."""
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    return minimum_level()


@pytest.mark.long
def test_the_functions_of_the_installed_tensorflow_change_what_its_cpp_code_logs(run_program: ProgramRunner) -> None:
    # A separate process, in which these are the first such failures: TensorFlow logs the 1st, 2nd, 4th, ... of them.
    program = run_program(
        """
        import contextlib, os
        os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
        import tensorflow as tf
        from coordinator.ps_strategy.tensorflow_internals.process import minimum_level, quiet_logs, set_minimum_level

        set_minimum_level(0)
        for text, scope in (("shown", contextlib.nullcontext()), ("silent", quiet_logs())):
            with scope, contextlib.suppress(tf.errors.InvalidArgumentError):
                print(minimum_level())
                tf.raw_ops.StringToNumber(string_tensor=text, out_type=tf.float32)
        """
    )
    assert program.stdout.split() == ["0", str(FATAL)]
    assert "shown" in program.stderr
    # Before 2.21, TensorFlow reads the level only once.
    assert ("silent" in program.stderr) == bool(off({"tensorflow": tf.__version__}))


def test_the_level_stays_if_the_user_has_set_it_or_debugs(
    default_level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="coordinator"), quiet_logs():
        assert minimum_level() == default_level
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    with quiet_logs():
        assert minimum_level() == default_level


def test_advice_on_retracing_is_left_out_for_tensorflows_own_functions_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = "5 out of the last 5 calls to <function %s at 0x1> triggered tf.function retracing."
    monkeypatch.setattr(logging, "raiseExceptions", False)
    with quiet_logs():
        tf.get_logger().warning(advice, "MultiDeviceSaver.save.<locals>.tf_function_save")
        tf.get_logger().warning(advice, "step")
        tf.get_logger().warning("%d", "wrong arguments")
    tf.get_logger().warning(advice, "MultiDeviceSaver.restore.<locals>.tf_function_restore")
    assert [record.args[0].split(".")[0] for record in caplog.records] == [
        "step",
        "wrong arguments",
        "MultiDeviceSaver",
    ]


def test_the_first_profile_is_reported_before_it_begins(tmp_path):
    stock, reported = _pywrap_profiler.ProfilerSession, []
    with profiles_reported(reported.append):
        for _ in range(2):
            tf.summary.trace_on(graph=False, profiler=True, profiler_outdir=str(tmp_path))
            tf.summary.trace_off()
    assert reported == [str(tmp_path)]
    assert _pywrap_profiler.ProfilerSession is stock
