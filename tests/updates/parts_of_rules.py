"""Access to the internal parts of update rules, for tests."""

import tensorflow as tf

from coordinator.updates.gradient_store import ENTRY_SIZE, vector_list
from coordinator.updates.rule_state import NO_STEP


def model_of(rule):
    """Returns the model that a rule trains, with its variables by server."""
    return rule._model


def stores_of(rule):
    """Returns the gradients that a rule has collected, by server."""
    return rule._stores


def log_of(rule):
    """Returns the log that decides which gradients make the next updates."""
    return rule._log


def own_model_of(rule):
    """Returns the models that the workers train themselves."""
    return rule._own


def finish_updates(rule):
    """Finishes, on the client, the updates that a dead worker left unfinished."""
    rule._finish_updates(0)


def begin_again(rule):
    """Forgets all that a rule that collects gradients has counted and collected, as if it were new."""
    state = rule.state
    workers = state.workers
    for variable in (state.version, state.counts, state.clocks, state.seconds, workers.fence):
        variable.assign(tf.zeros_like(variable))
    workers.pulled_version.assign(tf.fill(workers.pulled_version.shape, tf.constant(NO_STEP, tf.int64)))
    rule._log._ready.assign(vector_list(tf.zeros([0, ENTRY_SIZE], tf.int64)))
    for store in rule._stores:
        store.clear()


def variables_of_control(control):
    """Returns the variables of what decides which changes of models count."""
    return [control._variable, control._workers, control._counted]


def forget_generation(mean):
    """Makes a mean of models begin again with the shared variables, as a new one."""
    mean._generation.assign(0)


def committed_of(rule):
    """Returns the numbers of the ranges that a rule has committed."""
    slots = rule.state.committed._read().numpy()
    return sorted(slots[slots > 0] - 1)
