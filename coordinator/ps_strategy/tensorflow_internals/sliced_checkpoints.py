"""Checkpoints of a variable in several parts: each part is written as a slice of one tensor of the whole shape.

It is the form in which TensorFlow writes its own sharded variables. Whoever restores it reads the rows that it needs,
whatever the parts were that wrote them; a variable in one piece reads all, and parts read rows of one that was written
in one piece.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from tensorflow.python.trackable.constants import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving.saveable_object_util import TrackableSaveable

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced


class SavedInSlices:
    """A mixin for classes of variables whose rows are in other variables.

    Attributes:
      parts: these variables, whose rows are consecutive.
    """

    parts: Sequence[Any]

    # Private, all: what checkpoints and SavedModels call on variables. No public way saves a slice of a tensor.

    def _serialize_to_tensors(self) -> dict[str, dict[str, Any]]:
        slices = {
            name: part._serialize_to_tensors()[VARIABLE_VALUE_KEY]
            for name, part in zip(self._slice_names(), self.parts, strict=True)
        }
        return {VARIABLE_VALUE_KEY: slices}

    def _restore_from_tensors(self, restored_tensors: dict[str, dict[str, Any]]) -> list[Any]:
        # With `slices_restored`.
        slices = restored_tensors[VARIABLE_VALUE_KEY]
        return [
            part._restore_from_tensors({VARIABLE_VALUE_KEY: slices[name]})
            for name, part in zip(self._slice_names(), self.parts, strict=True)
        ]

    def _slice_names(self) -> list[str]:
        """Returns which rows of the whole each part has, as `tf.raw_ops.SaveV2` has it in `shape_and_slices`."""
        rows, *rest = self.shape.as_list()  # type: ignore[attr-defined]  # of the other base
        row = "".join(f":0,{size}" for size in rest)
        names, first = [], 0
        for part in self.parts:
            names.append(f"{' '.join(map(str, [rows, *rest]))} {first},{part.shape[0]}{row}")
            first += part.shape[0]
        return names

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        for part in self.parts:
            part._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            copies = [object_map[part] for part in self.parts]
            object_map[self] = type(self)(copies, self._shared_name)  # type: ignore[call-arg,attr-defined]


@contextlib.contextmanager
def slices_restored() -> Iterator[None]:
    """A scope in which all slices of a tensor are restored, and not the first one alone."""
    # Private: TensorFlow saves what `_serialize_to_tensors` returns for a tensor, also slices, but forgets them when it
    # restores. Its own sharded variables use an older interface, which variables of Keras do not have.
    stock = TrackableSaveable.restore

    @functools.wraps(stock)
    def restore(self: Any, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        if len(self._local_names) == len(self.specs):
            return stock(self, restored_tensors, restored_shapes)
        slices = {spec.slice_spec: tensor for spec, tensor in zip(self.specs, restored_tensors, strict=True)}
        return self._trackable._restore_from_tensors({self._local_names[0]: slices})

    with attribute_replaced(TrackableSaveable, "restore", restore):
        yield
