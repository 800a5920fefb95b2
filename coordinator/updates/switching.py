"""Replacing a rule by another one during training."""

from typing import Any


def switch(current: Any, rule: Any) -> None:
    """Replaces a rule by another one once all scheduled functions have finished.

    Args:
      current: the `UpdateRule` that is used.
      rule: the one that replaces it.

    Raises:
      ValueError: it is for other variables, for other epochs or none (`once`), or in use.
      Exception: what `join` raises; then nothing is switched.
    """
    _check_successor(current, rule)
    strategy = current._strategy
    strategy.join()
    # What other threads have scheduled since then runs afterwards.
    with strategy.quiet():
        current._finish()
        rule.state = current.state
        rule._use_state()
        current._successor = lambda: rule.current
        strategy.extended.services.rules.discard(current)
        change = f"{type(current).__name__} to {type(rule).__name__}"
        strategy.events.record("rule_changed", name=type(rule).__name__, detail=change)
        strategy.extended.services.retrace()


def _check_successor(current: Any, rule: Any) -> None:
    if rule is current or rule._successor or current._strategy is not rule._strategy:
        raise ValueError("switch_to takes a rule of the same strategy that was not used before.")
    mine, theirs = ([id(v) for v in (*each._model.variables, *each._tables.variables)] for each in (current, rule))
    if mine != theirs:
        raise ValueError("switch_to takes a rule that was created for the same variables, in the same order.")
    if current._once is not rule._once:
        raise ValueError("switch_to takes a rule that was created with the same once= as this one.")
