"""Tests of `fit` and `evaluate` on sources of each kind: of the client, of dicts, and with sharded variables."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.data import Epochs, Source, arrays, client
from tests.ps_strategy.sharded.partitioners import partitioned

# Keras reads variables in a way that NumPy 2 warns of.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = 23
NUMBERS = np.arange(SIZE)
Y = np.arange(SIZE, dtype="float32")[:, None]


class CountedRows(keras.Model):
    """Reads a row of a sharded table for each example, a dict with its number, and counts its visits."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = tf.Variable(tf.zeros([SIZE]), trainable=False)
        self.table = keras.layers.Embedding(SIZE, 2)
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(tf.reshape(self.table(x["number"]), [-1, 2]))

    def train_step(self, data: Any) -> Any:
        numbers = tf.cast(tf.reshape(data[0]["number"], [-1]), tf.int32)
        self.visits.assign_add(tf.reduce_sum(tf.one_hot(numbers, SIZE), axis=0))
        return super().train_step(data)


@pytest.fixture(scope="module")
def model(strategy: coordinator.ParameterServerStrategy) -> CountedRows:
    with strategy.scope(), partitioned():
        model = CountedRows()
        model({"number": NUMBERS})
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    assert len(model.table.embeddings.value.variables) == 2
    return model


def generated() -> Any:
    for number in NUMBERS:
        yield {"number": number}, np.float32([number])


class Pairs:
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return {"number": NUMBERS[index]}, Y[index]


@pytest.mark.long
@pytest.mark.parametrize(
    "source",
    [arrays({"number": NUMBERS}, Y), client(Pairs()), client(generated)],
    ids=["arrays", "sequence", "iterated"],
)
def test_fit_and_evaluate_take_dicts_from_sources_of_each_kind(model: CountedRows, source: Source) -> None:
    model.visits.assign(tf.zeros([SIZE]))
    history = model.fit(source, batch_size=5, epochs=2, validation_data=source, verbose=0).history
    model.fit(Epochs(source, 4, batches_per_range=2), verbose=0)
    assert set(model.visits.numpy().tolist()) == {3.0}
    expected = model.evaluate({"number": NUMBERS}, Y, verbose=0)
    assert model.evaluate(source, batch_size=6, verbose=0) == pytest.approx(expected)
    assert model.distribute_strategy.evaluate(model, source)["loss"] == pytest.approx(expected)
    assert len(history["val_loss"]) == 2
    with pytest.raises(ValueError, match="steps or validation_steps cannot be given along with a source"):
        model.evaluate(source, steps=2, verbose=0)
