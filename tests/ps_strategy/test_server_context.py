"""What a server says of a client's context, and that it frees one when told to."""

import socket

import pytest

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.server_context import Answer, ServerContext


def test_nobody_and_somebody_who_does_not_answer_are_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with ServerContext(address, 1) as context:
            assert context.renew(0.3) is Answer.SILENT
    with ServerContext(address, 1) as context:
        assert context.renew(10.0) is Answer.UNREACHED
        assert context.release(10.0) is Answer.UNREACHED


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_server_knows_the_clients_that_it_has(strategy, shared_cluster, job) -> None:
    address = shared_cluster.spec[job][0]
    own = tensorflow_internals.context_id()
    with ServerContext(address, own) as context:
        assert context.renew(10.0) is Answer.HELD
    with ServerContext(address, own ^ 1) as another:
        assert another.renew(10.0) is Answer.UNKNOWN
        assert another.release(10.0) is Answer.HELD, "what is not there is as good as freed"
