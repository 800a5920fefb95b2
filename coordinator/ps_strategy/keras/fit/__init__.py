"""Runs the steps of Keras 3's `model.fit`, `evaluate` and `predict` on workers.

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
"""
