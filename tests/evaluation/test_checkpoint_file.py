import os
from pathlib import Path

import h5py
import pytest

from coordinator.evaluation.checkpoint_file import CheckpointFile


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
def test_the_number_is_what_the_name_ends_in(name: str, number: int | None) -> None:
    assert CheckpointFile(f"/runs-9/{name}", 0).number == number


def test_only_an_index_or_a_weights_file_completes_a_checkpoint(tmp_path: Path) -> None:
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


def test_a_weights_file_written_again_in_its_place_leaves_its_copy_alone(tmp_path: Path) -> None:
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
    with pytest.raises(OSError, match="written meanwhile"):
        CheckpointFile(checkpoint.path, checkpoint.written_ns - 1).copy_to(str(tmp_path / "best-1"))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint.copy_to(str(tmp_path / "best-1"))


def test_what_was_written_since_it_was_found_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a-1.index"
    path.write_text("x")
    checkpoint = CheckpointFile.of_file(str(path))
    checkpoint.require_unchanged()
    os.utime(path, ns=(0, checkpoint.written_ns + 1))
    with pytest.raises(OSError, match="written meanwhile"):
        checkpoint.require_unchanged()
    path.unlink()
    checkpoint.require_unchanged()  # what was read before it was deleted is as good


def test_a_weights_file_is_copied_without_a_lock_that_training_could_run_into(tmp_path: Path) -> None:
    path = str(tmp_path / "a.weights.h5")
    with h5py.File(path, "w") as file:
        CheckpointFile.of_file(path).copy_to(str(tmp_path / "best-1"))
        file["still"] = [1.0]
    copy = CheckpointFile.of_file(path).copy_to(str(tmp_path / "best-1"))
    with h5py.File(copy, "r") as copied, h5py.File(path, "a") as file:
        file["again"] = [2.0]
        assert list(copied) == ["still"]
