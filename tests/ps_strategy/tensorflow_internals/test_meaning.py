"""Tests that TensorFlow's private interfaces exist and mean what the library assumes.

Tests that change the connection to the cluster run in separate processes.
"""

import threading

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals import functions, handles
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete

TIMEOUT = 30.0


@tf.function
def add(x, y=10, *, z=100):
    return {"sum": x + y + z, "none": None}


def call(concrete, *inputs, manager=None):
    """Calls a concrete function with its own captures."""
    inputs = [*inputs, *concrete.captured_inputs]
    return call_concrete(concrete, inputs, manager or CancellationManager())


def test_an_executor_belongs_to_the_thread_that_binds_it_and_keeps_it():
    from tensorflow.python.eager import context, executor

    is_async = {}

    def bind():
        bound = functions.bind_executor()
        is_async["bound"] = context.context().executor.is_async()
        assert (tf.constant(1) + 1).numpy() == 2
        bound.clear_error()

    def set_another():
        # One that can be distinguished from the executor that all threads share.
        kept = executor.new_executor(enable_async=True)
        context.context().executor = kept
        run_in_thread(bind)
        is_async["other"] = context.context().executor.is_async()
        del kept
        is_async["fallen back"] = context.context().executor.is_async()

    run_in_thread(set_another)
    assert is_async == {"bound": False, "other": True, "fallen back": False}


def run_in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_a_cancellation_reaches_the_calls_that_were_made_with_it_and_no_others():
    queue = tf.queue.FIFOQueue(1, tf.int32)
    concrete = tf.function(lambda: queue.dequeue() + 1).get_concrete_function()
    cancelled, other = CancellationManager(), CancellationManager()
    outcomes = {}

    def dequeue(name, manager):
        try:
            outcomes[name] = call(concrete, manager=manager).numpy()
        except tf.errors.CancelledError as error:
            outcomes[name] = error

    threads = {
        name: threading.Thread(target=dequeue, args=(name, manager))
        for name, manager in [("cancelled", cancelled), ("other", other)]
    }
    for thread in threads.values():
        thread.start()
    assert not cancelled.is_cancelled
    cancelled.cancel()
    cancelled.cancel()
    threads["cancelled"].join(TIMEOUT)
    assert isinstance(outcomes["cancelled"], tf.errors.CancelledError)
    assert cancelled.is_cancelled
    assert not other.is_cancelled
    queue.enqueue(5)
    threads["other"].join(TIMEOUT)
    assert outcomes["other"] == 6


def test_a_call_begun_with_a_used_cancellation_is_cancelled_at_once():
    manager = CancellationManager()
    manager.cancel()
    queue = tf.queue.FIFOQueue(1, tf.int32)
    with pytest.raises(tf.errors.CancelledError):
        call(tf.function(queue.dequeue).get_concrete_function(), manager=manager)


def test_arguments_left_out_are_filled_in():
    assert functions.with_defaults(add, (1,), {}) == ((1, 10), {"z": 100})
    assert functions.with_defaults(add, (1, 2), {"z": 3}) == ((1, 2), {"z": 3})
    assert functions.with_defaults(add, (), {"y": 2, "x": 1}) == ((1, 2), {"z": 100})
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), 5)
    assert functions.with_defaults(concrete, (1,), {}) == ((1, 5), {"z": 100})
    with pytest.raises(TypeError, match="too many positional"):
        functions.with_defaults(add, (1, 2, 3), {})


def test_self_is_not_an_argument_of_a_bound_method():
    class Scale:
        @tf.function
        def apply(self, x, factor=2):
            return x * factor

    assert functions.with_defaults(Scale().apply, (1,), {}) == ((1, 2), {})


def test_arguments_are_flattened_to_the_tensors_that_a_function_takes():
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), z=tf.TensorSpec([], tf.int32))
    inputs = functions.flat_inputs(concrete, (np.int32(1), 10), {"z": tf.constant(3)})
    assert [int(tensor) for tensor in inputs] == [1, 3]
    with pytest.raises(TypeError, match="missing a required argument"):
        functions.flat_inputs(concrete, (1,), {})
    with pytest.raises(TypeError, match="Cannot convert 'text'"):
        functions.flat_inputs(concrete, ("text", 10), {"z": 3})


def test_a_call_packs_what_the_function_returns():
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32))
    assert call(concrete, tf.constant(1)) == {"sum": tf.constant(111), "none": None}
    assert call(tf.function(lambda: None).get_concrete_function()) is None


def test_captures_follow_the_arguments_and_may_be_replaced():
    variables = [tf.Variable(1.0), tf.Variable(100.0)]
    concrete = tf.function(variables[0].assign_add).get_concrete_function(tf.TensorSpec([]))
    assert concrete.captured_inputs[0] is variables[0].handle
    handle = variables[1].handle
    value = call_concrete(concrete, [tf.constant(5.0), handle], CancellationManager())
    assert value.numpy() == 105
    assert [variable.numpy() for variable in variables] == [1, 105]


def test_an_error_of_a_call_names_the_line_in_the_users_code():
    @tf.function
    def check(x):
        tf.debugging.assert_equal(x, 0, "must be zero")

    with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero") as caught:
        call(check.get_concrete_function(tf.TensorSpec([], tf.int32)), tf.constant(1))
    assert "Detected at node" in str(caught.value)
    assert ", in check" in str(caught.value)


def new_table():
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant(["a"]), tf.constant([7], tf.int64))
    return tf.lookup.StaticHashTable(initializer, default_value=-1)


def test_tables_are_created_by_the_creator_in_scope():
    made = []

    def create(next_creator, *args, **kwargs):
        made.append(next_creator(*args, **kwargs))
        return made[-1]

    with handles.resource_creator_scope("StaticHashTable", create):
        table = new_table()
    assert made == [table]
    assert table.lookup(tf.constant("a")).numpy() == 7
    assert new_table() not in made


def test_a_handle_leads_to_its_table_or_variable():
    table, variable = new_table(), tf.Variable(1.0)

    @tf.function
    def outer(text):
        return tf.function(lambda: table.lookup(text))(), variable + 1.0

    owners = [
        handles.owner_of_handle(tensor)
        for tensor in outer.get_concrete_function(tf.TensorSpec([], tf.string)).captured_inputs
    ]
    assert {id(owner) for owner in owners if owner is not None} == {id(table), id(variable)}
    assert handles.owner_of_handle(tf.constant(1)) is None
    assert variable.handle.dtype == tf.resource


def test_a_table_of_a_saved_model_is_created_by_saved_functions(tmp_path):
    module = tf.Module()
    module.table = new_table()
    module.look_up = tf.function(module.table.lookup, input_signature=[tf.TensorSpec([], tf.string)])
    tf.saved_model.save(module, str(tmp_path))
    tables = []

    def create(next_creator, *args, **kwargs):
        tables.append(next_creator(*args, **kwargs))
        return tables[-1]

    with handles.resource_creator_scope("RestoredStaticHashTable", create):
        loaded = tf.saved_model.load(str(tmp_path))
    [table] = tables
    assert handles.is_restored_resource(table)
    assert not handles.is_restored_resource(module.table)

    create_table, initialize = handles.restored_functions(table)
    handle = call(create_table)
    captures = [handle if tensor is table.resource_handle else tensor for tensor in initialize.captured_inputs]
    assert any(tensor is handle for tensor in captures)
    call_concrete(initialize, captures, CancellationManager())
    look_up = loaded.look_up.concrete_functions[0]
    inputs = [handle if tensor is table.resource_handle else tensor for tensor in look_up.captured_inputs]
    value = call_concrete(look_up, [tf.constant("a"), *inputs], CancellationManager())
    assert tf.nest.flatten(value)[0].numpy() == 7


MEMBERSHIP = """
    import os

    import portpicker

    from coordinator.ps_strategy.membership.cluster_definition import Task, client_server_def, server_def
    from coordinator.ps_strategy.tensorflow_internals import process

    environment = process.client_environment()
    environment.__enter__()

    import tensorflow as tf

    def start_server(job, index):
        address = f"localhost:{portpicker.pick_unused_port()}"
        definition = tf.train.ServerDef(job_name=job, task_index=index, protocol="grpc")
        definition.cluster.job.add(name=job).tasks[index] = address
        return tf.distribute.Server(definition), address

    assert process.current_server_def() is None
    client = f"localhost:{portpicker.pick_unused_port()}"
    process.set_server_def(client_server_def("grpc", client))
    assert process.current_server_def().job_name == "chief"
    own_id = process.context_id()
    assert 0 <= own_id < 2**64
    assert (tf.constant(1) + 1).device == "/job:chief/replica:0/task:0/device:CPU:0"

    servers, addresses = {}, {}
    tasks = Task("ps", 0), Task("worker", 2), Task("worker", 5)
    for task in tasks:
        servers[task], addresses[task] = start_server(task.job, task.index)

    def connect(*tasks):
        named = server_def("grpc", client, {task: addresses[task] for task in tasks})
        process.update_server_def(named, 600.0)

    def add_on(task, value):
        with tf.device(task.device + "/device:CPU:0"):
            return add(tf.constant(value)).numpy()

    connect(*tasks[:2])
    with tf.device(tasks[0].device + "/device:CPU:0"):
        variable = tf.Variable(1.0)
    add = tf.function(variable.assign_add)
    assert add_on(tasks[1], 1.0) == 2.0

    connect(*tasks)
    assert add_on(tasks[2], 1.0) == 3.0, "a function that was traced before runs on a task that was added"
    connect(tasks[0], tasks[2])
    assert variable.numpy() == 3.0, "a variable stays readable when a task goes"
    assert add_on(tasks[2], 1.0) == 4.0
    try:
        add_on(tasks[1], 1.0)
    except (tf.errors.OpError, ValueError):
        pass
    else:
        raise AssertionError("a task that is no longer named runs nothing")

    addresses[tasks[1]] = f"localhost:{portpicker.pick_unused_port()}"
    try:
        connect(*tasks)
    except tf.errors.UnavailableError:
        pass
    else:
        raise AssertionError("a named task that does not answer is an error")
    from coordinator.ps_strategy.membership.clients import Answer, RemoteContext

    assert process.context_id() == own_id
    assert RemoteContext(client, own_id).renew(10.0) is Answer.HELD, "the client's own server has it too"
    assert RemoteContext(addresses[tasks[0]], own_id).renew(10.0) is Answer.HELD
    assert RemoteContext(addresses[tasks[0]], own_id ^ 1).renew(10.0) is Answer.UNKNOWN
    print("members came and went", flush=True)
    os._exit(0)  # TensorFlow cannot stop a server that it started.
"""


@pytest.mark.long
def test_variables_and_traces_survive_when_tasks_are_added_and_removed(run_program):
    assert "members came and went" in run_program(MEMBERSHIP).stdout


def test_an_untraced_copy_is_the_same_function_without_traces():
    traces = []

    @tf.function(reduce_retracing=True, jit_compile=False)
    def double(x):
        traces.append(x)
        return 2 * x

    assert double(tf.constant(1)) == 2
    again = functions.untraced_copy(double)
    assert again is not double
    assert (again(tf.constant(1)), double(tf.constant(1))) == (2, 2)
    assert len(traces) == 2
    assert again.python_function is double.python_function


def test_a_function_of_a_saved_model_cannot_be_traced_again(tmp_path):
    module = tf.Module()
    module.double = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([], tf.int32)])
    tf.saved_model.save(module, str(tmp_path))
    double = tf.saved_model.load(str(tmp_path)).double
    assert functions.untraced_copy(double) is None
