"""The strategy over TensorFlow servers, and the only folder that talks to TensorFlow's distributed runtime.

From what users call inwards:

    parameter_server_strategy   what users make: scope, schedule, join
    parameter_server_extended   where variables go; what a replica is
    cluster_definition          who the servers are
    tensorflow_runtime          who of them is connected; runs work on them
    failure_table               whose fault an error is
    traced_function             one function for all workers; one call of it
    per_worker_*, worker_index  what every worker has a copy of
    dataset_distribution        a dataset for each worker
    tensorflow_internals        the one door to TensorFlow's private API
"""
