from pathlib import Path

import pytest

from coordinator.errors import SettingError
from coordinator.launch.run_request import Host, fill, parse_hosts, read_hostfile, slots_of, spread


def test_hosts_have_a_name_as_ssh_takes_it_and_a_number_of_slots() -> None:
    hosts = parse_hosts("hosts", "a:2, user@b.example.org:4,10.0.0.5,[fe80::1]:3")
    assert hosts == (Host("a", 2), Host("user@b.example.org", 4), Host("10.0.0.5", 1), Host("fe80::1", 3))
    assert slots_of(hosts) == 10
    assert parse_hosts("hosts", "me@[fe80::1]") == (Host("me@fe80::1", 1),)


def test_a_hostfile_has_a_host_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb:3  # the new one\nc\n")
    assert read_hostfile(path) == (Host("a", 2), Host("b", 3), Host("c", 1))


def test_other_lists_are_refused() -> None:
    wrong = {"": "got ''", "a:0": "got 'a:0'", "a:two": "got 'a:two'", "a:2,,b": "got ''", "a b": "got 'a b'"}
    for text, words in {**wrong, "-oProxyCommand=x": "must name hosts", "a:1,b:1,a:2": "names a twice"}.items():
        with pytest.raises(SettingError, match="hosts") as raised:
            parse_hosts("hosts", text)
        assert words in raised.value.reason


def test_a_hostfile_that_cannot_be_read_or_names_no_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read"):
        read_hostfile(tmp_path / "hosts")
    (tmp_path / "hosts").write_text("\n# none\n")
    with pytest.raises(SettingError, match="names no host"):
        read_hostfile(tmp_path / "hosts")


def test_workers_fill_one_host_after_the_other_and_parameter_servers_take_turns() -> None:
    hosts = parse_hosts("hosts", "a:2,b:1")
    assert fill(hosts, 3) == ["a", "a", "b"]
    assert fill(hosts, 2) == ["a", "a"]
    assert spread(hosts, 3) == ["a", "b", "a"]
