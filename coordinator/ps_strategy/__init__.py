"""The strategy over TensorFlow servers, and the only folder that talks to TensorFlow's distributed runtime.

From what users call inwards:

    parameter_server_strategy   what users make: scope, schedule, join
    parameter_server_extended   where variables go; what a replica is
    cluster_definition          who the servers are
    polled_cluster_resolver     the same, said again and again while workers come and go
    membership                  who of them is connected
    server_admission            what is settled with each server that is connected to:
        server_version              that it runs the same TensorFlow
        client_note, client_lease   who it keeps variables for, and for how long; server_context: in gRPC
    witness                     whether a parameter server still has what it had
    tensorflow_runtime          runs work on the workers
    failure_table               whose fault an error is
    schedule_arguments          what `schedule` was given
    traced_function             one function for all workers; one call of it
    parameter_server_recovery   brings lost parameter servers back:
        variable_store              what was on them
        restore_source              where it comes back from
        guarded_save                no checkpoint of half-restored variables
        saved_progress              how many steps were lost
    per_worker_*, worker_index  what every worker has a copy of
    dataset_distribution        a dataset for each worker
    tensorflow_internals        the one door to TensorFlow's private API
"""
