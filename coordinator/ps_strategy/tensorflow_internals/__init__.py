"""The one door to TensorFlow's private API.

Nothing else in the library imports from `tensorflow.python`. Each use in here says in a line why no public name serves;
`tests/ps_strategy/tensorflow_internals/test_meaning.py`, and tests named after a module, fail loudly when one of them changes
its meaning.

Two variables of the environment are set here (`prepare_process`) because TensorFlow's C++ reads them there and offers
no other switch.
"""

from coordinator.ps_strategy.tensorflow_internals.calls import (
    CancellationManager,
    call,
    captures_of,
    flat_inputs,
    fresh,
    named_arguments,
    packed_outputs,
    with_defaults,
)
from coordinator.ps_strategy.tensorflow_internals.compilation import compiled_calls, is_compiled
from coordinator.ps_strategy.tensorflow_internals.function_registration import FunctionRegistration
from coordinator.ps_strategy.tensorflow_internals.graphs import built_function, replace_input
from coordinator.ps_strategy.tensorflow_internals.handles import (
    attach_initial_value,
    attached_initial_value,
    copy_handle_data,
    new_handle,
    owner_of_handle,
    present_handle,
    replace_handles,
    variable_handle,
)
from coordinator.ps_strategy.tensorflow_internals.process import (
    bind_executor,
    context_id,
    current_server_def,
    own_executor,
    prepare_process,
    set_server_def,
    update_server_def,
)
from coordinator.ps_strategy.tensorflow_internals.reads import (
    Reader,
    graph_around,
    is_within,
    read_variable,
    reads_as_ever,
    reads_replaced,
)
from coordinator.ps_strategy.tensorflow_internals.resources import (
    accept_asynchronous,
    forget_last_saved_step,
    is_restored_resource,
    refuse_asynchronous,
    resource_creator_scope,
    restored_functions,
    saves_asynchronously,
)
from coordinator.ps_strategy.tensorflow_internals.shared_variable import make_shared

__all__ = [
    "CancellationManager",
    "FunctionRegistration",
    "Reader",
    "accept_asynchronous",
    "attach_initial_value",
    "attached_initial_value",
    "bind_executor",
    "built_function",
    "call",
    "captures_of",
    "compiled_calls",
    "context_id",
    "copy_handle_data",
    "current_server_def",
    "flat_inputs",
    "forget_last_saved_step",
    "fresh",
    "graph_around",
    "is_compiled",
    "is_restored_resource",
    "is_within",
    "make_shared",
    "named_arguments",
    "new_handle",
    "own_executor",
    "owner_of_handle",
    "packed_outputs",
    "prepare_process",
    "present_handle",
    "read_variable",
    "reads_as_ever",
    "reads_replaced",
    "refuse_asynchronous",
    "replace_handles",
    "replace_input",
    "resource_creator_scope",
    "restored_functions",
    "saves_asynchronously",
    "set_server_def",
    "update_server_def",
    "variable_handle",
    "with_defaults",
]
