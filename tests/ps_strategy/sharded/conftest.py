"""Fixtures that create sharded variables on the shared strategy."""

import contextlib

import pytest

from tests.ps_strategy.sharded import partitioners


@pytest.fixture(scope="session")
def sharded_scope(strategy):
    """Returns a scope in which a partitioner divides variables: `with sharded_scope(partitioner):`."""

    @contextlib.contextmanager
    def scope(partitioner):
        with partitioners.partitioned(partitioner), strategy.scope():
            yield

    return scope


@pytest.fixture(scope="session")
def sharded(strategy):
    """Creates a sharded variable: `sharded(value, parts=3)`."""
    return lambda value, parts=2, **options: partitioners.sharded(strategy, value, parts, **options)
