"""Keras 3 on parameter servers: runs the steps of `model.fit`, `evaluate` and `predict` on workers.

    Keras' loop                                        this package
      epoch iterator   one turn per `steps_per_execution`  FitExtension
        |              steps                               |
        v                                                  v
      train_function(feed)  -->  FitExtension       -->  feed.schedule(steps)  -->  strategy.schedule
        |                           newest logs  <--  feed           <--  futures
        v
      callbacks, progress bar, history: Keras' own

Each batch of data on the client is trained on once per epoch (again, if its worker is lost before the step has
finished). An epoch ends when all its steps have finished, and the logs at its end cover all of them.

Exact evaluation: shards of the data are evaluated by workers that return what metrics add up to, and so count once.

    data --> shards --> strategy.schedule --> a worker: the state of the metrics after the batches of a shard
                                                                                     |
    results <-- the initial state of the metrics, and what each shard has added <----'

Nothing on a parameter server changes. A shard whose worker is lost is evaluated again; its future has one result.
"""
