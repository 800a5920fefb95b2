"""The operations of a traced function that run under locks, and whether any of them waits for another machine."""

from typing import Any


def waits_under_locks(concrete: Any) -> list[str]:
    """Describes each operation under a lock that may wait for another machine than the lock's.

    It may be on another machine, use a variable of another one, or take an input of another one that need not have
    come by the time that the lock is taken.

    Args:
      concrete: a concrete function.
    """
    graph = concrete.graph
    homes = {
        id(placeholder): tensor.device
        for tensor, placeholder in zip(
            concrete.captured_inputs, graph.inputs[-len(concrete.captured_inputs) :], strict=True
        )
    }
    return [
        wait
        for lock in graph.get_operations()
        if lock.type == "MutexLock"
        for wait in _waits(lock, locked_operations(lock), homes)
    ]


def locked_operations(lock: Any) -> list[Any]:
    """Returns the operations that run while a lock is held: those after its acquisition and before its release."""
    [release] = [operation for operation in lock.outputs[0].consumers() if operation.type == "ConsumeMutexLock"]
    before_release = _ancestors(release)
    after = {lock}
    # Operations are listed in an order in which each comes after its inputs.
    for operation in lock.graph.get_operations():
        if any(before in after for before in _before(operation)):
            after.add(operation)
    return [operation for operation in after if operation in before_release and operation is not lock]


def _waits(lock: Any, locked: list[Any], homes: dict[int, str]) -> list[str]:
    before_lock = _ancestors(lock)
    waits = []
    for operation in locked:
        if not _is_on(lock.device, operation, homes):
            waits.append(f"{operation.name} is not on {lock.device}, where its lock is")
        for tensor in operation.inputs:
            before = tensor.op
            if before.type != "Placeholder" and before not in before_lock and not _is_on(lock.device, before, homes):
                waits.append(f"{operation.name} under a lock takes {tensor.name} from another machine")
    return waits


def _is_on(device: str, operation: Any, homes: dict[int, str]) -> bool:
    """Returns whether an operation runs on a device; one on a variable runs on the variable's device."""
    resources = [
        homes[id(tensor)] for tensor in operation.inputs if tensor.dtype.name == "resource" and id(tensor) in homes
    ]
    return all(home == device for home in resources) if resources else operation.device == device


def _before(operation: Any) -> list[Any]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _ancestors(operation: Any) -> set[Any]:
    found, todo = set(), _before(operation)
    while todo:
        before = todo.pop()
        if before not in found:
            found.add(before)
            todo += _before(before)
    return found
