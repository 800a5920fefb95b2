"""What one evaluation found, as a value and as one line of JSON."""

import dataclasses
import json
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """One checkpoint's metrics.

    Attributes:
      checkpoint: path of the checkpoint, without `.index` for a TensorFlow checkpoint.
      number: the number that the checkpoint's name ends in (12 for `ckpt-12`); where it ends in none, how many
        evaluations the directory's results file holds, this one included.
      step: number of training steps behind the checkpoint.
      metrics: name to value; dict-valued metrics are flattened.
      time: when the evaluation ended, in unix seconds.
      written_ns: when the checkpoint was written, in unix nanoseconds of its file system. With the name it tells a
        checkpoint from an earlier one of the same name.
    """

    checkpoint: str
    number: int
    step: int
    metrics: Mapping[str, float]
    time: float
    written_ns: int = 0

    def to_json(self) -> str:
        """One line of JSON, without its end of line. A metric that is not a number stays one (`NaN`)."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> "EvaluationResult":
        """Reads what `to_json` wrote; further fields, of a later version, are left out.

        Raises:
          ValueError: the line is not such JSON.
        """
        fields = json.loads(line)
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in fields.items() if name in names})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not an evaluation result: {line!r}") from error
