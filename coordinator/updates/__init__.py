"""Update rules: what a pushed gradient does to the model on the parameter servers.

    with strategy.scope():
        rule = coordinator.updates.Asynchronous(optimizer, model.trainable_variables)

    with rule.pull() as version:
        ...
    accepted = rule.push(gradients, version)

Names are imported when they are first used; `decisions` and `settings` need no TensorFlow.

A user's own rule subclasses `Accumulating` and overrides the public `may_begin`, `is_accepted` or `combine`; see
docs/updates/own_rule.md. A rule of this library is in `rules/` and is exported in `__init__.pyi`. It shares its
decisions (`decisions`) with its simulation in `coordinator/simulation/rules.py`, and may override more methods:

    _begin_step    waits until a worker may pull
    _pull_model    gives the model that a step computes on
    _push          decides what happens to a gradient
    _finish        applies waiting gradients when another rule replaces this rule
    _use_state     creates the objects that depend on `state`, which may come from another rule
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
