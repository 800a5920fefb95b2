"""`coordinator top`: what it shows, on a terminal of any size, and when it ends."""

import contextlib
import io
import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

import pytest
from rich.console import Console

from coordinator.addresses import PageAddress
from coordinator.cli.command_line import main
from coordinator.cli.top import screen_of
from coordinator.dashboard.dashboard import PageServer, Publisher, state_of
from coordinator.http_server import HttpServer, Request
from tests.dashboard.made_cluster import MadeCluster
from tests.launch.command_process import CommandProcess


def test_all_is_shown_and_without_room_the_lost_workers_first() -> None:
    def shown(workers: int, width: int, height: int | None = None) -> list[str]:
        cluster = MadeCluster(workers)
        cluster.run(3)
        cluster.checkpoint()
        cluster.fail(0)
        state = json.loads(state_of(cluster.run(2, away=[workers - 1])))
        console = Console(file=io.StringIO(), width=width, height=height)
        console.print(screen_of(state, width, height))
        return console.file.getvalue().splitlines()

    text = "\n".join(shown(9, 120))
    for part in ("train.py, for 5.0 s", "workers 8/9", "ckpt-12 saved", "worker 8 was lost", "912 MB", "loss 2."):
        assert part in text
    assert text.count("train_step x 8") >= 7
    lines = shown(100, 80, 30)
    assert len(lines) <= 30
    assert next(line for line in lines if " live " in line or " lost " in line).split()[1:3] == ["99", "lost"]
    assert any("more" in line for line in lines)
    assert any("train_step x 8" in line for line in lines)


@pytest.fixture
def server() -> Iterator[PageServer]:
    publisher = Publisher(MadeCluster(2).run(3))
    server = PageServer(PageAddress("127.0.0.1", 0), publisher)
    yield server
    publisher.close()
    server.close(30.0)


def test_it_is_drawn_until_ctrl_c_ends_it(server: PageServer) -> None:
    with CommandProcess("top", server.url, environment=dict(os.environ)) as command:
        command.wait_output("steps/s")
        command.wait_output("train_step x 8")
        command.type("\x03")
        assert command.wait_ended() == 0
    assert "Traceback" not in command.output


STATE = json.loads(state_of(MadeCluster(2).run(3)))


@contextlib.contextmanager
def another_service(body: bytes) -> Iterator[str]:
    """The address of something that answers each request with the same."""

    def reply(request: Request) -> None:
        request.send(HTTPStatus.OK, "application/json", body)

    server = HttpServer("127.0.0.1", 0, reply, name="coordinator-test-server")
    yield f"http://127.0.0.1:{server.port}/token/"
    server.close(30.0)


def test_another_service_is_refused_in_one_line_and_its_text_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: list[object] = [
        "not an object",
        *({}, [], None, 5, {"workers": []}, {**STATE, "rate": "fast"}, {**STATE, "time": 1e400}),
        {name: value for name, value in STATE.items() if name != "timeline"},
        {**STATE, "workers": [{**STATE["workers"][0], "state": "elsewhere"}]},
        {**STATE, "history": {"rates": [float("nan")]}},
    ]
    for state in wrong:
        with another_service(json.dumps(state).encode()) as url:
            assert main(["top", url, "--once"]) == 2, state
        words = "coordinator top: what answers there is no dashboard of this version of the library (0."
        assert capsys.readouterr().err.startswith(words), state
    # No HTTP.
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as threads:

        def reply() -> None:
            with server.accept()[0] as connection:
                connection.recv(65_536)
                connection.sendall(b"\0\0\x18\x04\0")

        replied = threads.submit(reply)
        assert main(["top", f"http://127.0.0.1:{server.getsockname()[1]}/token"]) == 2
        replied.result()
    assert capsys.readouterr().err.startswith("coordinator top: there is no dashboard at http://127.0.0.1:")
    assert main(["top", "http://127.0.0.1:port"]) == 2
    usage = {**STATE["servers"][0]["usage"], "task": "[/red]"}
    right = {**STATE, "servers": [{**STATE["servers"][0], "usage": usage}]}
    with another_service(json.dumps(right).encode()) as url:
        assert main(["top", url, "--once"]) == 0
    assert "[/red]" in capsys.readouterr().out


def test_the_token_may_come_from_the_environment_or_a_file(
    server: PageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = server.url.removesuffix(f"{server.token}/")
    path = tmp_path / "token"
    path.write_text(f"{server.token}\n")
    path.chmod(0o640)
    assert main(["top", url, "--once"]) == 2
    assert "with its token" in capsys.readouterr().err
    assert main(["top", url, "--once", "--token-file", str(path)]) == 2
    assert f"{path} can be read or written by others: chmod 600 {path}" in capsys.readouterr().err
    path.chmod(0o600)
    assert main(["top", url, "--once", "--token-file", str(path)]) == 0
    assert main(["top", server.url, "--once", "--token-file", str(path)]) == 2
    monkeypatch.setenv("COORDINATOR_DASHBOARD_TOKEN", server.token)
    assert main(["top", url, "--once"]) == 0
    assert main(["top", server.url, "--once"]) == 0
    assert main(["top", f"{server.url}x", "--once"]) == 2
    assert "The dashboard has no such page" in capsys.readouterr().err
