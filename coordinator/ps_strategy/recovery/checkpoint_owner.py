"""Ownership of a directory of checkpoints: no other client overwrites or restores the owner's checkpoints.

    restore_from   take: `owner.json` names this client from now on; note which checkpoints are there
    save           require: does `owner.json` still name this client?  no --> CheckpointsTakenOver, nothing is written
    recovery       require, and has: only checkpoints that were there or that this client wrote are restored

The client that began last owns the directory, because a job may start again after its machine vanished, and the former
client may wake up later. Process numbers, which are 1 in every container, host names and clocks do not identify a
client, so each `take` writes a random number. `take` also writes former owners' numbers, because a file system may
show an older content of a file for a while.

Promise: a client that has lost the directory writes and deletes nothing there, except files of a checkpoint that
servers are already writing. This checkpoint is not listed, and the owner does not restore it.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import socket
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.addresses import is_url
from coordinator.errors import CheckpointsTakenOver

_logger = logging.getLogger("coordinator")

OWNER_FILE = "owner.json"
# Maximum numbers: of former owners in a record (`_FORMER`), of checkpoints that a client knows as its own (`_OWN`).
_FORMER, _OWN = 20, 1000


class CheckpointOwner:
    """A client as the owner of one directory at a time. Any thread may call every method.

    Before `take`, or if the directory cannot be written, every save and restore is allowed.
    """

    def __init__(self) -> None:
        self._directory: str | None = None
        self._number = ""
        self._former: list[str] = []
        # By name: a digest of what this client wrote; None if the checkpoint existed before `take`.
        self._own: dict[str, bytes | None] = {}

    def take(self, directory: str, existing: Sequence[str]) -> None:
        """Makes this client the owner of a directory, and creates it. `existing` has the paths of its checkpoints."""
        self.leave()
        number, path = uuid.uuid4().hex, os.path.join(directory, OWNER_FILE)
        self._own = {os.path.basename(checkpoint): None for checkpoint in existing}
        try:
            former = _record_in(directory)
            self._former = [former["number"], *former["former"]][:_FORMER] if former else []
            tf.io.gfile.makedirs(directory)
            record = {
                "number": number,
                "former": self._former,
                "process": os.getpid(),
                "program": sys.argv[0] if sys.argv else "",
                "host": socket.gethostname(),
                "since": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            }
            replace_file(path, json.dumps(record) + "\n")
        except (OSError, tf.errors.OpError) as error:
            _logger.warning(
                "%s cannot be written, so it is not noticed if another client uses these checkpoints: %s", path, error
            )
            return
        self._directory, self._number = directory, number

    def leave(self) -> None:
        """Ends the checks. The record stays, since no other client is the owner."""
        self._directory = None

    def require(self) -> None:
        """Raises CheckpointsTakenOver if another client owns the directory, OpError if the record cannot be read."""
        directory = self._directory
        record = None if directory is None else _record_in(directory)
        # A missing record means that somebody has emptied the directory. The next owner may be writing a new record.
        if record is None or record["number"] in (self._number, *self._former):
            return
        raise CheckpointsTakenOver(
            str(directory),
            f"The checkpoints in {directory!r} belong to another client since {record.get('since')}: process "
            f"{record.get('process')} ({record.get('program')}) on the host {record.get('host')}. This one, process "
            f"{os.getpid()} on {socket.gethostname()}, neither saves nor restores there any more, so that neither "
            "client gets the other's model. End this program. Or, if the other one has ended, call "
            "strategy.restore_from again here.",
        )

    def record(self, path: str) -> None:
        """Records that this client has written a checkpoint in the directory."""
        self._own[os.path.basename(path)] = _content_of(path)
        for former in [*self._own][:-_OWN]:
            self._own.pop(former, None)

    def record_any(self, path: str) -> None:
        """Records that this client has written a checkpoint, if it is in the directory."""
        if self._directory is not None and _normal(os.path.dirname(path)) == _normal(self._directory):
            self.record(path)

    def has(self, path: str) -> bool:
        """Returns whether a checkpoint existed before `take`, or has the content that this client wrote."""
        if self._directory is None:
            return True
        name = os.path.basename(path)
        written = self._own.get(name)
        return name in self._own and written in (None, _content_of(path) or written)


def replace_file(path: str, text: str) -> None:
    """Replaces the content of a file in one step; raises `tf.errors.OpError` if the file cannot be written."""
    draft = f"{path}.{uuid.uuid4().hex}.new"
    try:
        with tf.io.gfile.GFile(draft, "w") as file:
            file.write(text)
        tf.io.gfile.rename(draft, path, overwrite=True)
    except tf.errors.OpError:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.remove(draft)
        raise


def _normal(directory: str) -> str:
    return directory.rstrip("/") if is_url(directory) else os.path.realpath(directory)


def _record_in(directory: str) -> dict[str, Any] | None:
    try:
        with tf.io.gfile.GFile(os.path.join(directory, OWNER_FILE)) as file:
            record = json.loads(file.read())
        return {**record, "number": str(record["number"]), "former": [*map(str, record["former"])]}
    except (tf.errors.NotFoundError, tf.errors.FailedPreconditionError, ValueError, TypeError, KeyError):
        return None


def _content_of(path: str) -> bytes | None:
    """Returns a digest of a checkpoint's index, which has checksums of all values; None if it cannot be read."""
    try:
        with tf.io.gfile.GFile(f"{path}.index", "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=16).digest()
    except tf.errors.OpError:
        return None
