import pytest

from coordinator.launch.program_process import LogFilter

LOGS = (
    b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    b"I0000 00:00:1795426568.932662   27184 port.cc:153] oneDNN custom operations are on.\n"
    b"E0000 00:00:1795426568.932662   27184 a/long/path/to/some/file.cc:52] failed call\n"
    b"2026-11-23 09:47:40.123456: W tensorflow/core/framework/op.cc:1] deprecated\n"
)
SHOWN = (
    b"I am not a log\n",
    b"WARNING: something else\n",
    b"F0000 00:00:1795426568.932662   27184 logging.cc:1] fatal\n",
    b"2026-11-23 09:47:40,123 INFO root of the program\n",
    b"\r 10%|#   |\r 20%|##  |\n",
    b"\n",
    "caf\N{LATIN SMALL LETTER E WITH ACUTE}\n".encode(),
    b"E0000 is how it ends",
)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_log_lines_of_tensorflow_are_left_out_however_they_are_split(size: int) -> None:
    data = LOGS.join([b"", *SHOWN])
    log_filter = LogFilter()
    shown = b"".join(log_filter.feed(data[start : start + size]) for start in range(0, len(data), size))
    assert shown + log_filter.end() == b"".join(SHOWN)


def test_the_start_of_a_line_is_withheld_only_while_it_may_be_a_log_line() -> None:
    log_filter = LogFilter()
    assert log_filter.feed(b"Password: ") == b"Password: "
    assert log_filter.feed(b"E") == b"E", "within a line"
    assert log_filter.feed(b"\n" + b"E") == b"\n"
    assert log_filter.feed(b"nter") == b"Enter"
    for prompt in (b"Epochs: ", b"I0 or I1? ", b"2026 or 2027? ", b"Weights: ", b"WARNING: overwrite? "):
        assert log_filter.feed(b"\n" + prompt) == b"\n" + prompt
    for start in (LOGS[:20], LOGS[LOGS.index(b"I0000") :][:30], b"2026-11-23 09:47:40.1"):
        assert log_filter.feed(b"\n" + start) == b"\n"
        assert log_filter.feed(b"Q") == start + b"Q"
