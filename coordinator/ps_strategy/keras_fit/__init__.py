"""`model.fit`, `evaluate` and `predict` of Keras 3 on parameter servers.

    Keras' loop                                        here
      epoch iterator   one turn, `steps_per_execution`   FitExtension
        |              steps long, after another           |
        v                                                  v
      train_function(feed)  -->  ScheduledFunction  -->  feed.schedule(steps)  -->  strategy.schedule
        |                          newest logs <--  DispatchesInFlight  <--  futures
        v
      callbacks, progress bar, history: Keras' own

It promises that batches of data on the client are each trained on once in an epoch (again, if their worker is lost on
the way), that an epoch ends when all its steps have finished, and that what Keras tells at its end is of all of them.
"""
