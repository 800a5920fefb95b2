"""The strategy over TensorFlow servers, and the only folder that uses TensorFlow's distributed runtime.

From the user's side inwards; a folder imports only folders below it:

    parameter_server_strategy   the strategy that users create: scope, schedule, join
    parameter_server_extended   the hooks that TensorFlow calls on it: where variables go, what a replica is
    strategy_parts              the connections, threads and bookkeeping behind it
    keras/                      `fit` and evaluation on the workers, and all uses of Keras' private API (internals/)
    recovery/                   restores lost parameter servers from checkpoints, and guards saves
    calls/                      how a call reaches a worker: traces, their cache, failures, the runtime
    fusing/                     several calls as one, and messages between servers packed
    per_worker/                 datasets, tables and variables with a copy on each worker
    sharded/                    variables whose rows are on several parameter servers
    membership/                 which servers there are, and which of them this client is connected to
    tensorflow_internals/       all uses of TensorFlow's private API
"""
