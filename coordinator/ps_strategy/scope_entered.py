"""The scope of a strategy where it is in force already."""

import tensorflow as tf


class ScopeEntered:
    """Stands for `strategy.scope()` inside a replica context of the strategy: entering it changes nothing."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> tf.distribute.Strategy:
        return self._strategy

    def __exit__(self, *_: object) -> None:
        pass
