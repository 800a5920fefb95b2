"""Tests of the conversion of Parquet and CSV files, also by the command line."""

import datetime
import importlib
import io
import os
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.cli.command_line import main
from coordinator.data import conversion
from coordinator.data.conversion import write
from coordinator.errors import LaunchError

TABLES = (
    {"id": [0, 1], "x": [[0.5, 1.0], [1.5, 2.0]], "text": ["a", b"bc"], "some": [[1], []], "is": [True, False]},
    {"id": [2], "x": [[2.5, 3.0]], "text": ["d"], "some": [[2, 3]], "is": [True]},
)


def read(printed, count):
    """The features of the first examples, read by the call that was printed."""
    source = eval(printed, {"coordinator": coordinator, "tf": tf})
    assert source.size == count
    return source.read(np.array([0, 0, count, 0, -1]))


def test_rows_of_tables_become_examples(tmp_path):
    path = os.fspath(tmp_path / "a.tfrecord")
    columns = write(iter(TABLES), path)
    found = read(f"coordinator.data.records({path!r}, features={{{columns}}})", 3)
    assert found["id"].numpy().tolist() == [0, 1, 2]
    np.testing.assert_array_equal(found["x"], [[0.5, 1], [1.5, 2], [2.5, 3]])
    assert found["text"].numpy().tolist() == [b"a", b"bc", b"d"]
    assert found["some"].to_list() == [[1], [], [2, 3]]
    assert found["is"].numpy().tolist() == [1, 0, 1]
    assert sorted(os.listdir(tmp_path)) == ["a.tfrecord", "a.tfrecord.records-index.npy"]


def test_what_cannot_be_converted_leaves_no_file(tmp_path):
    for tables, words in (
        (({"x": [1.0, None]},), "'x' has values of the type NoneType.*Fill missing"),
        (({"x": [1]}, {"x": ["a"]}), "'x' has values of type int64 and of type string"),
        (({"x": [1]}, {"y": [1]}), "has other columns.*these differ: x, y"),
    ):
        with pytest.raises(LaunchError, match=words):
            write(iter(tables), os.fspath(tmp_path / "a.tfrecord"))
        assert not os.listdir(tmp_path)


def test_the_command_says_what_is_missing(tmp_path, monkeypatch, capsys):
    path, out = tmp_path / "a.csv", os.fspath(tmp_path / "out")
    path.write_text("id,x\n1,2.5\n")
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    assert main(["data", "convert", os.fspath(path), out]) == 2
    assert "pip install 'coordinator-tf[data]'" in capsys.readouterr().err
    assert main(["data", "convert", os.fspath(tmp_path / "none.csv"), out]) == 2
    assert "none.csv' does not exist" in capsys.readouterr().err
    (tmp_path / "out" / "a.tfrecord").write_text("")
    assert main(["data", "convert", os.fspath(path), out]) == 2
    assert "would be overwritten" in capsys.readouterr().err


def parquet(**columns):
    """The bytes of a Parquet file."""
    # By name, as the library does: it is installed by those who convert alone.
    pyarrow, module = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    file = io.BytesIO()
    module.write_table(pyarrow.table(columns), file)
    return file.getvalue()


BAD_FILES = {
    "ragged.csv": (b"id,x\n1,2\n3\n", "'ragged.csv' cannot be converted: CSV parse error: Expected 2 columns, got 1"),
    # More than what pyarrow reads at first.
    "late.csv": (b"x,text\n" + b"1,%b\n" % (b"a" * 2000) * 1000 + b"abc,b\n", "to int64: invalid value 'abc'."),
    "twice.csv": (b"id,id\n1,2\n", "'twice.csv' has more than one column 'id'."),
    "large.parquet": ({"id": np.array([2**63 + 5], np.uint64)}, "9223372036854775813, which is too"),
    "time.parquet": ({"t": [datetime.datetime(2020, 1, 1)]}, "values of the type datetime, which are not"),
    "other.txt": (b"id\n1\n", "'other.txt' is neither .parquet nor .csv."),
    "gs://bucket/a.csv": (None, "'gs://bucket/a.csv' cannot be converted: "),
}


def test_a_bad_file_is_one_sentence_and_the_next_try_is_not_blocked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.csv").write_text("id\n1\n")
    for number, (name, (content, words)) in enumerate(BAD_FILES.items()):
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else parquet(**content))
        out = tmp_path / f"out{number}"
        for paths in ([name], ["good.csv", name]):
            assert main(["data", "convert", *paths, out.name]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("coordinator data: ")
            assert words in line or "has other columns than the files before it" in line, name
            assert not out.exists() or not os.listdir(out)
        assert main(["data", "convert", "good.csv", out.name]) == 0
        capsys.readouterr()
        assert os.listdir(out) == ["good.tfrecord"]


def test_parquet_and_csv_files_are_converted_despite_what_a_killed_conversion_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    count = 2500
    (tmp_path / "a.parquet").write_bytes(
        parquet(id=range(count), x=np.arange(count, dtype=np.float32), text=["a"] * count)
    )
    (tmp_path / "b.csv").write_text("id,x,text\n7,2.5,a\n8,3.5,b\n")
    convert, tables = ["data", "convert", "a.parquet", "b.csv", "out"], conversion._tables  # noqa: SLF001

    def killed(path):
        yield from tables(path)
        # What is there when the process is killed now.
        shutil.copytree("out", "left", dirs_exist_ok=True)

    monkeypatch.setattr(conversion, "_tables", killed)
    assert main(convert) == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    left = os.listdir("left")
    assert left
    assert all(name.endswith(".tmp") for name in left)
    capsys.readouterr()
    assert main([*convert[:-1], "left"]) == 0
    assert {"a.tfrecord", "b.tfrecord"} <= {*os.listdir("left")}
    found = read(capsys.readouterr().out, count + 2)
    assert found["id"].numpy().tolist() == [*range(count), 7, 8]
    assert found["x"].numpy()[-2:].tolist() == [2.5, 3.5]
