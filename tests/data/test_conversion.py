"""Tests of the conversion of Parquet and CSV files, also by the command line."""

import importlib
import os
import sys

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.cli.command_line import main
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


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (({"x": [1.0, None]},), "'x' has values of the type NoneType.*Fill missing"),
        (({"x": [1]}, {"x": ["a"]}), "'x' has values of type int64 and of type string"),
        (({"x": [1]}, {"y": [1]}), "has other columns.*these differ: x, y"),
    ],
)
def test_what_cannot_be_converted_leaves_no_file(tmp_path, tables, words):
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


@pytest.mark.long
def test_parquet_and_csv_files_are_converted(tmp_path, capsys):
    # By name, as the library does: it is installed by those who convert alone.
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    count, out = 2500, os.fspath(tmp_path / "out")
    table = pyarrow.table({"id": range(count), "x": np.arange(count, dtype=np.float32), "text": ["a"] * count})
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_text("id,x,text\n7,2.5,a\n8,3.5,b\n")
    assert main(["data", "convert", os.fspath(tmp_path / "a.parquet"), os.fspath(tmp_path / "b.csv"), out]) == 0
    found = read(capsys.readouterr().out, count + 2)
    assert found["id"].numpy().tolist() == [*range(count), 7, 8]
    assert found["x"].numpy()[-2:].tolist() == [2.5, 3.5]
