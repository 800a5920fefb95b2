"""What a checkpoint holds of epochs, whether it fits the data that a program has now, and what a rule has committed."""

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from coordinator.data.ledger import Ledger
from coordinator.data.range_order import fingerprint
from coordinator.data.source import Source
from coordinator.setting_checks import check_integer

_VERSION = 1


class CommitRecord(Protocol):
    """The ranges that a rule has committed, on a parameter server."""

    def waiting(self) -> Iterable[int]:
        """Returns those whose gradients wait for an update, and are in no checkpoint."""

    def recover(self) -> None:
        """Forgets all ranges, unless they were restored with the epochs, or neither was. While no function runs."""


def check_settings(source: Any, sizes: Mapping[str, Any], shuffle: Any, prefetch: Any) -> None:
    """Checks the settings of `Epochs`.

    Raises:
      TypeError: `source` is none, or a number is no integer.
      ValueError: one of `sizes`, by their names, is not positive, or the source does not allow a setting.
    """
    if not isinstance(source, Source):
        raise TypeError(
            f"Epochs takes a source, got {source!r}. Make one of your data, such as coordinator.data.arrays(x, y)."
        )
    for name, number in sizes.items():
        check_integer(name, number, minimum=1)
    if shuffle is not None:
        check_integer("shuffle", shuffle, minimum=0, maximum=2**63 - 1)
        if source.is_sequential:
            raise ValueError(f"{source!r} is read in order, so it cannot be shuffled: leave shuffle out.")
    check_integer("prefetch", prefetch, minimum=0)
    if prefetch and source.is_on_client:
        raise ValueError(f"{source!r} is read by the client, ahead of the workers: leave prefetch out.")


@dataclasses.dataclass(frozen=True)
class EpochsState:
    """The data and the settings that decide which examples a range has.

    Attributes:
      size: the number of examples.
      digest: of the data.
      batch_size, shuffle, batches_per_range, drop_remainder: see `Epochs`.
      permutation: some values of the permutation that is used, which another release of TensorFlow might change.
    """

    size: int
    digest: str
    batch_size: int
    shuffle: int | None
    batches_per_range: int
    drop_remainder: bool
    permutation: tuple[int, ...]

    @classmethod
    def of(
        cls, source: Source, batch_size: int, shuffle: int | None, batches_per_range: int, drop_remainder: bool
    ) -> "EpochsState":
        """Returns those of a source and settings."""
        permutation = () if shuffle is None else fingerprint(shuffle)
        return cls(source.size, source.digest, batch_size, shuffle, batches_per_range, drop_remainder, permutation)

    def to_json(self, ledger: Ledger, waiting: Collection[int] = ()) -> str:
        """Returns them with the ranges that are done, except those of which gradients wait for an update."""
        below = min([ledger.below, *waiting])
        return json.dumps(
            {
                "version": _VERSION,
                **dataclasses.asdict(self),
                "below": below,
                "done": sorted({*range(below, ledger.below), *ledger.done}.difference(waiting)),
                "skipped": sorted(ledger.skipped),
            }
        )

    def from_json(self, text: Any) -> tuple[int, Sequence[int], Sequence[int]]:
        """Returns the ranges that are done: all below a number, further ones; and which of them were skipped.

        Raises:
          ValueError: data or settings are others.
        """
        saved = json.loads(text if isinstance(text, str) else bytes(text))
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"The checkpoint has epochs of format {saved.get('version')}, and this release of coordinator reads "
                f"format {_VERSION}: use the release that wrote it."
            )
        own = dataclasses.asdict(self) | {"permutation": list(self.permutation)}
        differing = [name for name, value in own.items() if saved[name] != value]
        if differing:
            raise ValueError(_message(differing, saved, own))
        return saved["below"], saved["done"], saved["skipped"]


def _message(differing: Sequence[str], saved: dict[str, Any], own: dict[str, Any]) -> str:
    if differing == ["permutation"]:
        return (
            "The checkpoint was written with a release of TensorFlow that shuffles in another way, so its epoch cannot "
            "be continued. Continue with that release until the epochs are done."
        )
    names = {"size": "the number of examples", "digest": "the content of the data"}
    parts = [
        names[name] if name == "digest" else f"{names.get(name, name)} ({saved[name]} then, {own[name]} now)"
        for name in differing
        if name != "permutation"
    ]
    return (
        f"The epochs in the checkpoint are of other data or settings; these differ: {', '.join(parts)}. Continue with "
        "those of then, or leave the epochs out of the tf.train.Checkpoint to begin with the first example."
    )
