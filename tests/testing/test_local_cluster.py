import os
import socket
from pathlib import Path

import psutil
import pytest

from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.probes import TaskProbe
from coordinator.launch import server_process
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.launch.fake_tensorflow import write_fake_tensorflow
from tests.launch.forked import is_same_program
from tests.program_runner import ProgramRunner

pytestmark = pytest.mark.cluster


@pytest.fixture
def quick_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes servers of clusters start quickly, and returns the folder that is put on `PYTHONPATH` for this."""
    folders = os.pathsep.join([os.environ["PYTHONPATH"], write_fake_tensorflow(tmp_path / "fake")])
    monkeypatch.setenv("PYTHONPATH", folders)
    # Variables that a client sets for itself; servers started from its process must not inherit them.
    monkeypatch.setenv("GRPC_FAIL_FAST", "true")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return folders


def test_real_servers_are_forked_from_a_process_that_loaded_tensorflow(shared_cluster: LocalCluster) -> None:
    servers = [psutil.Process(pid) for pid in shared_cluster.processes.values() if pid]
    assert {server.name() for server in servers} == {"worker-0", "worker-1", "ps-0", "ps-1"}
    assert len({server.ppid() for server in servers}) == 1
    # Not so fresh processes, as needed when TensorFlow's threads run.
    assert all(is_same_program(server.pid, server.ppid()) for server in servers)


def test_servers_and_client_are_reached_on_this_machine_alone(run_program: ProgramRunner) -> None:
    source = """
        import coordinator, os, psutil
        from coordinator.testing import LocalCluster
        from tests.heartbeat.reach import MOMENT, answers, own_addresses

        with LocalCluster(workers=1, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver):
            for pid in [os.getpid(), *cluster.processes.values()]:
                listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
                for port in {each.laddr.port for each in listening}:
                    print(answers("127.0.0.1", port), any(answers(own, port, MOMENT) for own in own_addresses()))
    """
    assert run_program(source).stdout.split("\n") == ["True False"] * 3 + [""]


@pytest.mark.long
def test_a_cluster_works_where_http_has_a_proxy(run_program: ProgramRunner) -> None:
    source = """
        import coordinator
        import tensorflow as tf
        from coordinator.testing import LocalCluster

        with LocalCluster(workers=1, ps=2) as cluster:
            with coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
                with strategy.scope():
                    variables = [tf.Variable(1.0) for _ in range(2)]
                print(strategy.schedule(tf.function(lambda: tf.add_n(variables))).result())
    """
    # Nothing listens there.
    proxies = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    assert run_program(source, environment=proxies).stdout == "2.0\n"


@pytest.mark.usefixtures("quick_servers")
def test_a_worker_comes_back_on_its_port_and_a_frozen_one_keeps_its_incarnation() -> None:
    with LocalCluster(workers=1, ps=1) as cluster, TaskProbe(cluster.spec["worker"][0]) as probe:
        before = probe.status(timeout=10)
        cluster.kill("worker", 0)
        assert not cluster.is_alive("worker", 0)
        assert probe.status(timeout=10) is None
        cluster.restart("worker", 0, wait=False)
        cluster.wait_ready("worker", 0)
        # This probe's own connection may be in its back-off, for up to half a second.
        wait_until(lambda: probe.status(timeout=10))
        after = probe.status(timeout=10)
        assert before is not None
        assert after is not None
        assert (before.devices, before.incarnation != after.incarnation) == (after.devices, True)
        cluster.freeze("worker", 0)
        assert cluster.is_alive("worker", 0)
        assert probe.status(timeout=0.5) is None
        cluster.thaw("worker", 0)
        assert probe.status(timeout=10) == after
        with pytest.raises(LaunchError, match="was started already"):
            cluster.start()


@pytest.mark.usefixtures("quick_servers")
def test_added_workers_have_the_next_index_and_closing_leaves_nothing(tmp_path: Path) -> None:
    cluster = LocalCluster(workers=1, ps=1).start()
    spec = cluster.spec
    addresses = [cluster.start_worker(), cluster.start_worker()]
    assert len({*addresses, *spec["worker"], *spec["ps"]}) == 4
    assert cluster.spec == spec
    for index, address in enumerate(addresses, start=1):
        with TaskProbe(address) as probe:
            status = probe.status(timeout=10)
        assert status is not None
        assert status.devices == (f"/job:worker/replica:0/task:{index}/device:CPU:0",)
    processes = [psutil.Process(pid) for pid in cluster.processes.values() if pid]
    assert list((tmp_path / "temporary").iterdir())
    cluster.freeze("worker", 0)
    cluster.kill("worker", 1)
    assert not cluster.is_alive("worker", 1)
    cluster.close()
    cluster.close()
    assert not any(process.is_running() for process in processes)
    assert not list((tmp_path / "temporary").iterdir())
    for address in [*addresses, *spec["worker"], *spec["ps"]]:
        host, _, port = address.partition(":")
        socket.create_server((host, int(port))).close()


@pytest.mark.usefixtures("quick_servers")
def test_a_server_that_does_not_start_is_named_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_BROKEN", "ps-0")
    with pytest.raises(LaunchError, match="/job:ps/task:0") as raised:
        LocalCluster(workers=1, ps=1).start()
    assert "the fake server fails as requested" in str(raised.value)
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.long
@pytest.mark.usefixtures("quick_servers")
def test_a_port_that_another_program_took_before_its_server_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = server_process.free_cluster({"worker": 1, "ps": 1})
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = {**free, "worker": [f"127.0.0.1:{other.getsockname()[1]}"]}
        found = iter([taken, taken, free])
        monkeypatch.setattr("coordinator.testing.local_cluster.free_cluster", lambda _: next(found))
        with LocalCluster(workers=1, ps=1) as cluster:
            assert cluster.spec == free
            assert cluster.is_alive("worker", 0)
            assert len(list((tmp_path / "temporary").iterdir())) == 1
        monkeypatch.setattr("coordinator.testing.local_cluster.free_cluster", lambda _: taken)
        with pytest.raises(LaunchError, match="Address already in use"):
            LocalCluster(workers=1, ps=1).start()
    assert not list((tmp_path / "temporary").iterdir())


def test_servers_that_do_not_exist_are_refused(shared_cluster: LocalCluster) -> None:
    for verb in ("kill", "restart", "freeze", "thaw", "pid", "is_alive", "wait_ready"):
        for job, index in (("worker", 2), ("ps", -1), ("chief", 0)):
            with pytest.raises(ClusterSpecError, match="there are /job:worker/task:0, /job:worker/task:1, /job:ps"):
                getattr(shared_cluster, verb)(job, index)
    for counts in ({"workers": 0}, {"ps": True}, {"workers": 1.5}, {"devices_per_worker": 0}):
        with pytest.raises(ClusterSpecError, match="at least 1, got"):
            LocalCluster(**counts)
    with pytest.raises(LaunchError, match="not started"):
        LocalCluster().kill("worker", 0)
