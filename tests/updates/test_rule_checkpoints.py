"""Tests of the state of a rule in a checkpoint, and after a parameter server was lost."""

import tensorflow as tf

from tests.updates.descent import new_rule, pushing_step


def test_a_checkpoint_has_version_clocks_and_counts_with_which_a_rule_continues(strategy, variables, tmp_path):
    rule, again = (new_rule(strategy, "asynchronous", variables) for _ in range(2))

    def train(rule, steps):
        step = pushing_step(rule, [tf.ones_like(variable) for variable in variables])
        for _ in range(steps):
            strategy.schedule(step)
        strategy.join()

    checkpoint = tf.train.Checkpoint(rule=rule)
    train(rule, 7)
    saved, path = rule.statistics(), checkpoint.save(str(tmp_path / "model"))
    assert (saved.updates, saved.pushes, saved.pulls, sum(saved.clocks.values())) == (7, 7, 7, 7)
    # No second model and no steps in flight.
    keys = {key.split("/.ATTRIBUTES")[0] for key, _ in tf.train.list_variables(path)}
    names = ("version", "counts", "clocks", "seconds")
    assert keys == {"_CHECKPOINTABLE_OBJECT_GRAPH", "save_counter", *(f"rule/state/{name}" for name in names)}
    train(rule, 5)
    assert rule.statistics().updates == 12
    checkpoint.restore(path).assert_consumed()
    assert rule.statistics() == saved
    tf.train.Checkpoint(rule=again).restore(path).assert_consumed()
    train(again, 2)
    assert int(again.version) == 9
