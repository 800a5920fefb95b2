"""The example `data_service`: each example is trained once; a restart of the dispatcher repeats none."""

import concurrent.futures
import contextlib
import importlib.util
import subprocess
import sys

import numpy as np
import portpicker
import pytest
import tensorflow as tf

from tests import ROOT
from tests.deadline import wait_until

TRAIN = ROOT / "examples" / "data_service/train.py"
SERVE = ROOT / "examples" / "data_service/serve.py"
TIMEOUT = 120.0
service = tf.data.experimental.service


@pytest.fixture
def train():
    spec = importlib.util.spec_from_file_location("data_service_train", TRAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def dispatcher():
    """The address of a data service with two workers."""
    server = service.DispatchServer()
    address = server.target.removeprefix("grpc://")
    workers = [service.WorkerServer(service.WorkerConfig(address, heartbeat_interval_ms=100)) for _ in range(2)]
    yield address
    del workers, server


@pytest.mark.long
def test_each_example_is_trained_once_and_the_position_is_not_saved(strategy, train, dispatcher, tmp_path):
    assert (train.train(strategy, dispatcher, 200) == 1).all()
    iterator = train.served(strategy, dispatcher, 200, "another")
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    with pytest.raises(ValueError, match="cannot be saved in a checkpoint"), strategy.quiet(TIMEOUT):
        checkpoint.save(tmp_path / "position")


@contextlib.contextmanager
def server(*arguments):
    """Runs one of the example's servers, which can be reached when the block begins."""
    command = [sys.executable, SERVE, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert "listens" in process.stdout.readline()
            yield
        finally:
            process.kill()


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_restarted_dispatcher_repeats_nothing_and_loses_only_its_last_answers(strategy, train, tmp_path, counted):
    ports = [portpicker.pick_unused_port() for _ in range(3)]
    dispatcher = "dispatcher", "--port", ports[0], "--work-dir", tmp_path
    with contextlib.ExitStack() as workers, concurrent.futures.ThreadPoolExecutor(1) as pool:
        with server(*dispatcher):
            for port in ports[1:]:
                workers.enter_context(server("worker", "--port", port, "--dispatcher", f"localhost:{ports[0]}"))
            training = pool.submit(train.train, strategy, f"localhost:{ports[0]}", 20_000)
            wait_until(lambda: training.done() or counted().finished > 50, TIMEOUT)
            assert not training.done()
        with server(*dispatcher):
            times = training.result(TIMEOUT)
    # TensorFlow's dispatcher writes an element to its journal before it answers the data worker that asked for it.
    assert set(times) <= {0, 1}, np.unique(times, return_counts=True)
    assert (times == 0).sum() <= len(ports[1:])
