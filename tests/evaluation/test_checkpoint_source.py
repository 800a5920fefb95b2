from pathlib import Path

import pytest

from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.checkpoint_source import CheckpointSource, newest_checkpoint
from tests.evaluation.tiny_training import TinyTraining, set_written


def made(name: str, written: int) -> CheckpointFile:
    return CheckpointFile(f"/d/{name}", written)


@pytest.mark.parametrize(
    ("found", "latest", "listed", "newest"),
    [
        ([], None, [], None),
        ([made("a-1", 5), made("a-2", 6)], None, [], "a-2"),
        ([made("a-9", 5), made("a-10", 5)], None, [], "a-10"),
        # A copied directory: the state file knows the order, the times do not.
        ([made("a-9", 7), made("a-10", 6)], "a-10", ["a-9", "a-10"], "a-10"),
        # Written, but not yet listed.
        ([made("a-1", 5), made("a-2", 6)], "a-1", ["a-1"], "a-2"),
        ([made("a-1", 5), made("b.weights.h5", 6)], "a-1", ["a-1"], "b.weights.h5"),
        # Not listed, since it is from before.
        ([made("old-7", 3), made("a-1", 5)], "a-1", ["a-1"], "a-1"),
        # The latest was deleted.
        ([made("a-1", 5)], "a-2", ["a-1", "a-2"], "a-1"),
    ],
)
def test_the_newest_is_the_latest_listed_or_a_later_unlisted(
    found: list[CheckpointFile], latest: str | None, listed: list[str], newest: str | None
) -> None:
    checkpoint = newest_checkpoint(found, latest, listed)
    assert (checkpoint.name if checkpoint else None) == newest


def test_a_directory_that_is_empty_or_not_there_has_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointSource(tmp_path).newest() is None
    assert CheckpointSource(tmp_path / "absent").newest() is None


def test_the_latest_of_a_checkpoint_manager_is_found(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path, keep=2)
    for step in (1, 2, 3):
        path = training.save(step)
    set_written(str(tmp_path / "ckpt-2.index"), 10.0)
    newest = CheckpointSource(tmp_path).newest()
    assert newest.path == path
    assert newest.number == 3


def test_a_weights_file_newer_than_the_state_file_is_found(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    training.save(1)
    path = str(tmp_path / "ckpt-5.weights.h5")
    training.model.save_weights(path)
    set_written(path, 1.0)
    assert CheckpointSource(tmp_path).newest().path == path
