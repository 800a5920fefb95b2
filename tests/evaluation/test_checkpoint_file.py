import os
from pathlib import Path

import h5py
import pytest
import tensorflow as tf

from coordinator.evaluation.checkpoint_watch import CheckpointFile, find_newest, newest_checkpoint
from tests.evaluation.tiny_training import TinyTraining, set_written


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ckpt-12", 12),
        ("ckpt-12.weights.h5", 12),
        ("epoch_3.weights.h5", 3),
        ("weights.03.weights.h5", 3),
        ("7", 7),
        ("model.weights.h5", None),
        ("ckpt-05-0.25.weights.h5", None),
        ("model2.weights.h5", None),
        ("final", None),
    ],
)
def test_the_number_is_at_the_end_of_the_name(name: str, number: int | None) -> None:
    assert CheckpointFile(f"/runs-9/{name}", 0).number == number


def test_a_checkpoint_is_found_by_its_index_or_weights_file(tmp_path: Path) -> None:
    for name in ("a-1.index", "a-1.data-00000-of-00001", "b-2.weights.h5", "checkpoint"):
        (tmp_path / name).write_text("x")
    found = [CheckpointFile.of_file(str(path)) for path in sorted(tmp_path.iterdir())]
    assert [checkpoint.name for checkpoint in found if checkpoint] == ["a-1", "b-2.weights.h5"]
    assert CheckpointFile.of_file(str(tmp_path / "gone.index")) is None


def test_a_copy_has_every_file_and_outlives_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    for name, text in {"a-1.index": "i", "a-1.data-00000-of-00002": "0", "a-1.data-00001-of-00002": "1"}.items():
        (tmp_path / name).write_text(text)
    checkpoint = CheckpointFile.of_file(str(tmp_path / "a-1.index"))
    assert checkpoint.copy_to(str(tmp_path / "to" / "best-1")) == str(tmp_path / "to" / "best-1")
    for file in checkpoint.files():
        Path(file).unlink()
    copies = {path.name: path.read_text() for path in (tmp_path / "to").iterdir()}
    assert copies == {"best-1.index": "i", "best-1.data-00000-of-00002": "0", "best-1.data-00001-of-00002": "1"}


def test_rewriting_a_weights_file_in_place_does_not_change_its_copy(tmp_path: Path) -> None:
    path = tmp_path / "a.weights.h5"
    path.write_text("old")
    copy = CheckpointFile.of_file(str(path)).copy_to(str(tmp_path / "best-1"))
    path.write_text("new")
    assert copy == str(tmp_path / "best-1.weights.h5")
    assert Path(copy).read_text() == "old"


def test_a_checkpoint_that_was_deleted_or_replaced_cannot_be_copied(tmp_path: Path) -> None:
    path = tmp_path / "a-1.index"
    path.write_text("x")
    checkpoint = CheckpointFile.of_file(str(path))
    with pytest.raises(OSError, match="was replaced"):
        CheckpointFile(checkpoint.path, checkpoint.written_ns - 1).copy_to(str(tmp_path / "best-1"))
    path.unlink()
    with pytest.raises(tf.errors.NotFoundError):
        checkpoint.copy_to(str(tmp_path / "best-1"))


def test_a_checkpoint_replaced_since_it_was_found_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a-1.index"
    path.write_text("x")
    checkpoint = CheckpointFile.of_file(str(path))
    checkpoint.require_unchanged()
    os.utime(path, ns=(0, checkpoint.written_ns + 1))
    with pytest.raises(OSError, match="was replaced"):
        checkpoint.require_unchanged()
    path.unlink()
    checkpoint.require_unchanged()  # what was read before the deletion is complete


def test_copying_a_weights_file_takes_no_lock_that_could_stop_training(tmp_path: Path) -> None:
    path = str(tmp_path / "a.weights.h5")
    with h5py.File(path, "w") as file:
        CheckpointFile.of_file(path).copy_to(str(tmp_path / "best-1"))
        file["still"] = [1.0]
    copy = CheckpointFile.of_file(path).copy_to(str(tmp_path / "best-1"))
    with h5py.File(copy, "r") as copied, h5py.File(path, "a") as file:
        file["again"] = [2.0]
        assert list(copied) == ["still"]


def found(name: str, written_ns: int) -> CheckpointFile:
    return CheckpointFile(f"/d/{name}", written_ns)


@pytest.mark.parametrize(
    ("checkpoints", "latest", "listed", "newest"),
    [
        ([], None, [], None),
        ([found("a-1", 5), found("a-2", 6)], None, [], "a-2"),
        ([found("a-9", 5), found("a-10", 5)], None, [], "a-10"),
        # A copied directory: only the state file has the order.
        ([found("a-9", 7), found("a-10", 6)], "a-10", ["a-9", "a-10"], "a-10"),
        # Written, but not yet listed.
        ([found("a-1", 5), found("a-2", 6)], "a-1", ["a-1"], "a-2"),
        ([found("a-1", 5), found("b.weights.h5", 6)], "a-1", ["a-1"], "b.weights.h5"),
        # Not listed, because an earlier training wrote it.
        ([found("old-7", 3), found("a-1", 5)], "a-1", ["a-1"], "a-1"),
        # The latest was deleted.
        ([found("a-1", 5)], "a-2", ["a-1", "a-2"], "a-1"),
    ],
)
def test_the_newest_is_the_latest_listed_or_a_later_unlisted_one(
    checkpoints: list[CheckpointFile], latest: str | None, listed: list[str], newest: str | None
) -> None:
    checkpoint = newest_checkpoint(checkpoints, latest, listed)
    assert (checkpoint.name if checkpoint else None) == newest


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert find_newest(str(tmp_path)) is None
    assert find_newest(str(tmp_path / "absent")) is None


def test_the_latest_of_a_checkpoint_manager_is_found(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path, keep=2)
    for step in (1, 2, 3):
        path = training.save(step)
    set_written(str(tmp_path / "ckpt-2.index"), 10.0)
    newest = find_newest(str(tmp_path))
    assert newest.path == path
    assert newest.number == 3


def test_a_weights_file_newer_than_the_state_file_is_found(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    training.save(1)
    path = str(tmp_path / "ckpt-5.weights.h5")
    training.model.save_weights(path)
    set_written(path, 1.0)
    assert find_newest(str(tmp_path)).path == path
