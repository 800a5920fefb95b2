"""Settings that `coordinator run` gives to a program count where its own options say nothing."""

import pytest

from coordinator.options import DASHBOARD, RESTART_COUNT, TRACE, Options, with_program_settings


def test_the_address_of_the_environment_is_used_unless_the_program_has_one() -> None:
    environment = {DASHBOARD: "127.0.0.1:8080/token"}
    assert with_program_settings(None, environment).dashboard == "127.0.0.1:8080/token"
    own = Options(dashboard="localhost:0", max_attempts=7)
    assert with_program_settings(own, environment) == own
    assert with_program_settings(own, {}) == own
    assert with_program_settings(None, {}) == Options()


def test_the_trace_of_each_start_has_a_file_unless_the_program_has_named_one() -> None:
    environment = {TRACE: "folder.d/trace.json", RESTART_COUNT: "0"}
    assert with_program_settings(None, environment).trace == "folder.d/trace.json"
    assert with_program_settings(None, environment | {RESTART_COUNT: "2"}).trace == "folder.d/trace.2.json"
    assert with_program_settings(Options(trace="own.json"), environment).trace == "own.json"


def test_a_wrong_address_of_the_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Options\.dashboard must be 'host:port'"):
        with_program_settings(None, {DASHBOARD: "here"})


def test_options_are_of_their_class() -> None:
    with pytest.raises(TypeError, match=r"options must be a coordinator\.Options, got 5"):
        with_program_settings(5, {})
