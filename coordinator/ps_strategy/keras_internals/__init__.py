"""The one door to what Keras 3 keeps to itself.

Each use in here says in a line why no public name serves; `tests/ps_strategy/keras/internals/test_optimizers.py`,
`test_keras_embeddings.py` and `test_keras_trainers.py` beside it fail loudly when Keras changes one of them.
"""

from coordinator.ps_strategy.keras.internals.optimizers import (
    build,
    exempt_from_weight_decay,
    has_strayed_slots,
    is_optimizer,
    learning_rate,
    scalar_variables,
    variable_of,
    view_for_variables,
)
from coordinator.ps_strategy.keras.internals.patches import EpochIterator, OwnData, TrainerExtension, extend_trainer
from coordinator.ps_strategy.keras_internals.embeddings import rows_read_alone

__all__ = [
    "EpochIterator",
    "OwnData",
    "TrainerExtension",
    "build",
    "exempt_from_weight_decay",
    "extend_trainer",
    "has_strayed_slots",
    "is_optimizer",
    "learning_rate",
    "rows_read_alone",
    "scalar_variables",
    "variable_of",
    "view_for_variables",
]
