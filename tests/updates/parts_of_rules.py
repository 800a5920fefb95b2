"""The parts of an update rule that users do not see. Tests take them from here alone."""


def model_of(rule):
    """Returns the model that a rule trains, with its variables by server."""
    return rule._parts.model


def accumulator_of(rule):
    """Returns the parts of a rule that hold its gradients on the servers."""
    return rule._accumulator


def averaging_of(rule):
    """Returns the workers' own models and the sums of them on the servers."""
    return rule._averaging


def finish_updates(rule):
    """Finishes, on the client, the updates that a dead worker left unfinished."""
    rule._finish_updates(0)
