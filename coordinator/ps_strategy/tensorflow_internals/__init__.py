"""All uses of TensorFlow's private API.

No other package of the library imports from `tensorflow.python`. A comment at each use says why no public name serves.
The tests in `tests/ps_strategy/tensorflow_internals/` fail if a release of TensorFlow changes a private name in use.
"""

from coordinator.versions import private_names_needed

# All of them at once, so that a version that lacks a name is refused at the first use, with advice.
with private_names_needed():
    from coordinator.ps_strategy.tensorflow_internals import (  # noqa: F401
        checkpoint_savers,
        datasets,
        functions,
        graph_calls,
        handles,
        process,
        replicas,
        shared_variable,
        unstored_variable,
    )
