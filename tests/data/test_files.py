"""Tests of files as data: rows, records and lines, read on the client and on the workers of the shared cluster."""

import io
import os

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import files, lines, records, rows

FEATURES = {"id": tf.io.FixedLenFeature([], tf.int64), "text": tf.io.FixedLenFeature([], tf.string)}
SIZES = (7, 1, 12, 5)


def positions(start, count, number=0, seed=-1):
    return np.array([0, start, count, number, seed])


def in_files(sizes=SIZES):
    """The numbers of the examples of each file."""
    ends = np.cumsum(sizes)
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def write_rows(folder):
    paths = []
    for number, ids in enumerate(in_files()):
        paths.append(os.fspath(folder / f"{number}.npy"))
        np.save(paths[-1], np.stack([np.full((2, 3), each, np.float32) for each in ids]))
    return paths


def write_records(folder, sizes=SIZES):
    paths = []
    for number, ids in enumerate(in_files(sizes)):
        paths.append(os.fspath(folder / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(paths[-1]) as writer:
            for each in ids:
                writer.write(example(each))
    return paths


def example(number):
    int64 = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
    text = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x" * number]))
    return tf.train.Example(features=tf.train.Features(feature={"id": int64, "text": text})).SerializeToString()


def write_lines(folder):
    paths = []
    for number, ids in enumerate(in_files()):
        paths.append(os.fspath(folder / f"{number}.csv"))
        end = "\r\n" if number % 2 else "\n"
        text = "id,text" + end + end.join(f"{each},{'x' * each}" for each in ids) + (end if number else "")
        (folder / f"{number}.csv").write_bytes(text.encode())
    return paths


def sources(folder, system=""):
    """Each source, and a function that returns the ids of what it has read; `system` is put before the paths."""
    written = [[system + path for path in write(folder)] for write in (write_rows, write_records, write_lines)]
    return [
        (rows(written[0]), lambda read: read.numpy()[:, 1, 2]),
        (records(written[1], FEATURES), lambda read: read["id"].numpy()),
        (
            lines(written[2], lambda found: tf.io.decode_csv(found, [0, ""]), skip=1),
            lambda read: read[0].numpy(),
        ),
    ]


@pytest.mark.parametrize("system", ["", "file://"])
def test_ranges_are_read_in_one_file_and_across_files(tmp_path, system):
    """Files of other file systems are opened for each range."""
    for source, ids_of in sources(tmp_path, system):
        assert source.size == sum(SIZES)
        # At the ends of files, and within.
        for start, count in ((0, 25), (3, 12), (7, 1), (8, 17), (24, 1)) if not system else ((2, 1), (7, 18)):
            found = ids_of(source.read(positions(start, count)))
            assert found.tolist() == list(range(start, start + count)), (source, start, count)
        found = [ids_of(source.read(positions(2, 20, number, seed=4))).tolist() for number in (0, 1)]
        assert found[0] != found[1] != sorted(found[1])
        assert sorted(found[0]) == sorted(found[1]) == list(range(2, 22)), "in another order if shuffled"


def test_a_file_that_has_another_size_than_before_is_named(tmp_path):
    path = write_rows(tmp_path)[0]
    source = rows(path)
    np.save(path, np.zeros([1, 2, 3], np.float32))
    with pytest.raises(ValueError, match=r"0\.npy' has another size here than the 296 bytes that it had"):
        source.read(positions(0, 1))


def test_an_empty_file_among_others_is_passed_over(tmp_path):
    written = write_records(tmp_path, [3, 0, 4])
    texts = [b"id\n0\n1\n2\n", b"id\n", b"", b"id\n3\n4\n5\n6"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.csv").write_bytes(text)
    for source in (
        records(written, lambda found: tf.io.parse_example(found, FEATURES)["id"]),
        lines([f"file://{tmp_path}/{number}.csv" for number in range(len(texts))], tf.strings.to_number, skip=1),
    ):
        read = tf.function(source.read)
        for start, count in ((1, 2), (2, 4), (0, 7)):
            assert read(positions(start, count)).numpy().tolist() == list(range(start, start + count)), source


def test_a_range_of_more_bytes_than_a_string_can_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_COPIED", 100)
    np.save(tmp_path / "rows.npy", np.arange(50.0))
    source = rows(tmp_path / "rows.npy")
    np.testing.assert_array_equal(tf.function(source.read)(positions(3, 12)), np.arange(3.0, 15.0))
    for read in (source.read, tf.function(source.read)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"A range has more than 100 bytes\. Use a smaller"):
            read(positions(3, 13))


def test_rows_lines_and_records_may_be_read_as_they_are(tmp_path):
    for values in (np.arange(24, dtype=np.int16), np.arange(24) % 2 == 0):
        path = tmp_path / "raw"
        path.write_bytes(values.tobytes())
        source = rows(path, values.dtype, (2, 3))
        np.testing.assert_array_equal(source.read(positions(1, 3)), values.reshape(4, 2, 3)[1:])
    np.testing.assert_array_equal(rows(np.arange(5)).read(positions(1, 2)), [1, 2])
    (tmp_path / "text").write_text("one\ntwo\n\nfour")
    assert lines(tmp_path / "text").read(positions(0, 4)).numpy().tolist() == [b"one", b"two", b"", b"four"]
    assert records(write_records(tmp_path)).read(positions(3, 1)).numpy().tolist() == [example(3)]


def test_an_index_is_kept_beside_the_file_and_made_again_if_it_does_not_fit(tmp_path):
    path = write_records(tmp_path, [9])[0]
    digest, index = records(path).digest, tmp_path / "0.tfrecord.records-index.npy"
    assert sorted(os.listdir(tmp_path)) == ["0.tfrecord", index.name]
    written, good, numbers, stat = os.stat(index).st_mtime_ns, index.read_bytes(), np.load(index), os.stat(path)
    assert records(path).digest == digest
    assert os.stat(index).st_mtime_ns == written

    def as_file(save, *arrays):
        save(file := io.BytesIO(), *arrays)
        return file.getvalue()

    for damaged in (
        b"",
        good[:-8],
        good[:-1] + b"\1",
        bytes(len(good)),
        as_file(np.save, numbers[:5]),
        as_file(np.save, np.float32(3)),
        as_file(np.savez, numbers),
        as_file(np.save, np.array([stat.st_size, stat.st_mtime_ns, *numbers[2:5]])),
    ):
        index.write_bytes(damaged)
        found = records(path)
        assert (found.size, found.digest, index.read_bytes()) == (9, digest, good), damaged
    write_records(tmp_path, [6])
    second = records(path)
    assert (second.size, second.digest != digest) == (6, True)


def test_files_that_do_not_fit_are_refused_in_words(tmp_path):
    text, empty, fortran = tmp_path / "text", tmp_path / "empty", tmp_path / "fortran.npy"
    text.write_text("no records, no rows")
    empty.write_text("")
    np.save(fortran, np.asfortranarray(np.ones([2, 3])))
    for refused, words in (
        (lambda: records(text), "is no TFRecord file, is compressed, or was cut off: what begins at byte 0"),
        (lambda: records(tmp_path / "nowhere"), "nowhere.*does not exist"),
        (lambda: records([]), "no path"),
        (lambda: records(3), "takes the path of a file"),
        (lambda: lines(empty), "without examples"),
        (lambda: rows(text), "is no .npy file"),
        (lambda: rows(text, np.float32, [2]), "19 bytes of rows, which is no positive multiple of 8"),
        (lambda: rows(text, np.float32), "dtype and shape together"),
        (lambda: rows(text, ">f4", [1]), "little-endian"),
        (lambda: rows(fortran), "ascontiguousarray"),
    ):
        with pytest.raises((ValueError, TypeError, FileNotFoundError), match=words):
            refused()
