"""Exact evaluation: shards of the data are evaluated by workers that return what metrics add up to, and so count once.

    data --> shards --> strategy.schedule --> a worker: the state of the metrics after the batches of a shard
                                                                                     |
    results <-- the initial state of the metrics, and what each shard has added <----'

Nothing on a parameter server changes. A shard whose worker is lost is evaluated again; its future has one result.
"""
