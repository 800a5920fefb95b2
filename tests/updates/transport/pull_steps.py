"""Rules and steps for the tests of reads during a pull."""

from coordinator.updates import Asynchronous
from tests.ps_strategy.every_worker import TIMEOUT, concrete_function
from tests.updates.descent import descend


def new_rule(variables, embeddings=()):
    return Asynchronous(descend, variables, embeddings=embeddings, learning_rate=0.5)


def result(strategy, step, *args):
    return strategy.schedule(step, args=args).result(TIMEOUT)


def traced(strategy, step, *args):
    return concrete_function(strategy, step, *args)


def reads_of(concrete, variable):
    """Returns the operations of a traced function that read a variable, by type."""
    captures = concrete.captured_inputs
    placeholders = concrete.graph.inputs[len(concrete.graph.inputs) - len(captures) :]
    [handle] = [inside for inside, outside in zip(placeholders, captures, strict=True) if outside is variable.handle]
    types = [operation.type for operation in handle.consumers()]
    return [found for found in types if found in ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")]
