"""Access to the internal parts of update rules, for tests."""


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


def committed_of(rule):
    """Returns the numbers of the ranges that a rule has committed."""
    slots = rule.state.committed._read().numpy()
    return sorted(slots[slots > 0] - 1)
