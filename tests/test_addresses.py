import pathlib
import socket

import pytest

from coordinator.addresses import check_port_is_free, checkpoint_path, is_url, local_path, parse_address, path_text
from coordinator.errors import LaunchError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("host:1", "host", 1), ("127.0.0.1:65535", "127.0.0.1", 65535), ("[::1]:2222", "::1", 2222)],
)
def test_an_address_is_split_into_host_and_port(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "[]:80", "host:port", "host:0", "host:65536", None, 80])
def test_an_invalid_address_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"must be 'host:port', got"):
        parse_address(text)


def test_a_port_in_use_is_named_with_how_to_find_the_process_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        words = (
            f"/job:worker/task:0 cannot serve on host:{port}: port {port}: Address already in use.*:{port}` shows it"
        )
        with pytest.raises(LaunchError, match=words):
            check_port_is_free("/job:worker/task:0", f"host:{port}")
    check_port_is_free("/job:worker/task:0", f"host:{port}")


URLS = ["gs://bucket/run", "s3://b", "hdfs://host:9000/run", "ram://x", "my-fs+v1.0://x"]
LOCAL = ["run", "/there/run", "./gs:/bucket", "a:b/c", "/there/gs://bucket", "C:/run", "", "0:/x"]


def test_a_url_has_a_scheme_and_stays_as_it_is() -> None:
    assert [is_url(path) for path in URLS] == [True] * len(URLS)
    assert [is_url(path) for path in LOCAL] == [False] * len(LOCAL)
    assert [path_text(path) for path in (*URLS, *LOCAL)] == [*URLS, *LOCAL]
    assert path_text("file:///there/a b") == "/there/a b"
    assert path_text(pathlib.Path("/there") / "run") == "/there/run"


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://b", "hdfs://host/run"])
def test_a_url_that_pathlib_has_changed_is_refused(url: str) -> None:
    for broken in (pathlib.Path(url), str(pathlib.Path(url))):
        with pytest.raises(ValueError, match="after pathlib has changed it"):
            path_text(broken)


def test_a_url_is_no_local_path() -> None:
    assert [local_path(path, "A trace") for path in LOCAL] == LOCAL
    with pytest.raises(ValueError, match=r"^A trace must be on a local file system, got 'gs://bucket/run'\."):
        local_path("gs://bucket/run", "A trace")


def test_a_path_that_is_a_pattern_has_no_checkpoints() -> None:
    assert checkpoint_path("gs://bucket/a b{c}") == "gs://bucket/a b{c}"
    for pattern in ("layers=[64]", "a*", "a?", "back\\slash"):
        with pytest.raises(ValueError, match=r"for a pattern\. Give another path"):
            checkpoint_path(pattern)
