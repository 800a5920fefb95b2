"""The checkpoints of a directory, as files.

    ckpt-7.index, ckpt-7.data-*     the checkpoint number 7
    ckpt-8_temp/                    one that is being written, or was when its program ended
    checkpoints.json                what is known of the complete ones
    checkpoint                      their names, for `tf.train.latest_checkpoint`

Promises: a checkpoint is in the lists only when all of it is written, and is taken off them before it is deleted. Each
list is replaced in one step. All paths are those of `tf.io.gfile`.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Sequence

import tensorflow as tf

from coordinator.checkpoints.policies import SavedCheckpoint
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.status_files import results
from coordinator.ps_strategy.recovery.checkpoint_owner import replace_file
from coordinator.ps_strategy.recovery.snapshots import delete_unfinished

LIST_FILE = "checkpoints.json"
_NAME = re.compile(r"ckpt-(\d+)(_temp/?|\.index|\.data-.*)$")


def path_of(directory: str, number: int) -> str:
    """Returns the path of a checkpoint."""
    return os.path.join(directory, f"ckpt-{number}")


def load(directory: str) -> list[SavedCheckpoint]:
    """Returns the complete checkpoints, oldest first. Those of a `tf.train.CheckpointManager` are known by its list.

    Raises:
      ValueError: the list cannot be parsed.
    """
    file = os.path.join(directory, LIST_FILE)
    if not tf.io.gfile.exists(file):
        found = _of_manager(directory)
    else:
        with tf.io.gfile.GFile(file) as lines:
            text = lines.read()
        try:
            entries = [(entry.pop("name"), entry) for entry in json.loads(text)["checkpoints"]]
            found = [SavedCheckpoint(os.path.join(directory, name), **entry) for name, entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file!r} is not a list of checkpoints: {text[:80]!r}. Repair or remove it.") from error
    return [each for each in found if tf.io.gfile.exists(f"{each.path}.index")]


def _of_manager(directory: str) -> list[SavedCheckpoint]:
    state = tf.train.get_checkpoint_state(directory)
    if state is None:
        return []
    paths = [os.path.join(directory, os.path.basename(path)) for path in state.all_model_checkpoint_paths]
    times = [*state.all_model_checkpoint_timestamps, *[0.0] * len(paths)]
    found = []
    for path, time in zip(paths, times, strict=False):
        number = re.search(r"-(\d+)$", path)
        found.append(SavedCheckpoint(path, int(number.group(1)) if number else 0, 0, time))
    return found


def numbers(directory: str) -> list[int]:
    """Returns the numbers of all checkpoints with any file, and deletes what was not written to its end."""
    found = []
    for name in tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else []:
        if match := _NAME.match(name):
            found.append(int(match.group(1)))
            if match.group(2).startswith("_temp"):
                delete_unfinished(path_of(directory, found[-1]))
    return found


def store(directory: str, checkpoints: Sequence[SavedCheckpoint]) -> None:
    """Replaces the lists.

    Raises:
      tf.errors.OpError: they cannot be written.
    """
    entries = []
    for each in checkpoints:
        fields = dataclasses.asdict(each)
        entries.append({"name": os.path.basename(fields.pop("path")), **fields})
    replace_file(os.path.join(directory, LIST_FILE), json.dumps({"checkpoints": entries}, indent=1) + "\n")
    # TensorFlow has no function for it that is not deprecated.
    lines = [f'model_checkpoint_path: "{entry["name"]}"' for entry in entries[-1:]]
    lines += [f'all_model_checkpoint_paths: "{entry["name"]}"' for entry in entries]
    lines += [f"all_model_checkpoint_timestamps: {entry['time']!r}" for entry in entries]
    replace_file(os.path.join(directory, "checkpoint"), "".join(f"{line}\n" for line in lines))


def delete(path: str) -> None:
    """Deletes the files of a checkpoint, the index first: without it there is none.

    Raises:
      tf.errors.OpError: they cannot be deleted.
    """
    for file in files(path):
        tf.io.gfile.remove(file)


def files(path: str) -> list[str]:
    """Returns the files of a checkpoint, the index first."""
    return [*tf.io.gfile.glob(f"{path}.index"), *tf.io.gfile.glob(f"{path}.data-*")]


def written_ns(path: str) -> int:
    """Returns when the index of a checkpoint was written, as evaluators know it; 0 if there is none."""
    found = CheckpointFile.of_file(f"{path}.index")
    return 0 if found is None else found.written_ns


def with_results(directory: str, checkpoints: Collection[SavedCheckpoint]) -> list[SavedCheckpoint]:
    """Returns checkpoints with the metrics that evaluators have written into the directory.

    Raises:
      EvaluationError: the file of results is damaged.
    """
    found = {(os.path.basename(each.checkpoint), each.written_ns): each.metrics for each in results(directory)}
    return [
        dataclasses.replace(
            each, metrics={**found.get((os.path.basename(each.path), each.written_ns), {}), **each.metrics}
        )
        for each in checkpoints
    ]
