"""Channels and messages of the requests that this library itself makes to TensorFlow's servers, without TensorFlow.

The messages are described by the few fields that are used here. They are part of TensorFlow's wire format
(`worker.proto`, `device_attributes.proto`, `eager_service.proto`, `master.proto`, `config.proto`, `cluster.proto`),
which does not change between releases; TensorFlow comes without Python classes for some of them. They are registered
in a separate pool, since TensorFlow registers messages of the same names in the default one.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

GET_STATUS = "/tensorflow.WorkerService/GetStatus"
KEEP_ALIVE = "/tensorflow.eager.EagerService/KeepAlive"
CLOSE_CONTEXT = "/tensorflow.eager.EagerService/CloseContext"
CLEANUP_ALL = "/tensorflow.WorkerService/CleanupAll"
CREATE_SESSION = "/tensorflow.MasterService/CreateSession"
CLOSE_SESSION = "/tensorflow.MasterService/CloseSession"

ChannelOptions = tuple[tuple[str, int], ...]


def channel_options(longest_backoff: int, *, detect_dead_host: bool) -> ChannelOptions:
    """Returns the options of a channel to a server that may be restarted at any time.

    Args:
      longest_backoff: the longest pause between two attempts to connect, in milliseconds; gRPC's own default is two
        minutes.
      detect_dead_host: whether a connection is given up, and the request reported as refused, when the host has
        acknowledged nothing for five seconds.
    """
    options: ChannelOptions = (
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", longest_backoff),
        # This one bounds a single attempt to connect, so it must leave room for a slow network.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # Neither the connection nor the back-off of another channel to the same address is shared.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )
    if not detect_dead_host:
        return options
    # Setting any keep-alive makes gRPC give up a connection whose packets are not acknowledged after the second value;
    # the first keeps it from sending pings, which servers answer with a disconnect.
    return (*options, ("grpc.keepalive_time_ms", 3_600_000), ("grpc.keepalive_timeout_ms", 5_000))


_Field = descriptor_pb2.FieldDescriptorProto
_STRING, _INT32, _FIXED64 = _Field.TYPE_STRING, _Field.TYPE_INT32, _Field.TYPE_FIXED64
# Each field: its number, its type or the name of a message, and whether it is repeated.
_MESSAGES: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "DeviceAttributes": {"name": (1, _STRING, False), "incarnation": (6, _FIXED64, False)},
    "GetStatusResponse": {"device_attributes": (1, "DeviceAttributes", True)},
    # What both KeepAlive and CloseContext take.
    "ContextRequest": {"context_id": (1, _FIXED64, False), "context_view_id": (2, _FIXED64, False)},
    # What CleanupAll takes.
    "ContainersRequest": {"container": (1, _STRING, True)},
    # A map, as it is on the wire.
    "TaskDef": {"key": (1, _INT32, False), "value": (2, _STRING, False)},
    "JobDef": {"name": (1, _STRING, False), "tasks": (2, "TaskDef", True)},
    "ClusterDef": {"job": (1, "JobDef", True)},
    "ConfigProto": {"cluster_def": (14, "ClusterDef", False)},
    "CreateSessionRequest": {"config": (2, "ConfigProto", False), "target": (3, _STRING, False)},
    "CreateSessionResponse": {"session_handle": (1, _STRING, False)},
    "CloseSessionRequest": {"session_handle": (1, _STRING, False)},
}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="coordinator/server_rpcs.proto", package="coordinator")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind, is_repeated) in fields.items():
            label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            if isinstance(kind, str):
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".coordinator.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"coordinator.{name}")) for name in _MESSAGES
    }


_CLASSES = _message_classes()
GetStatusResponse, ContextRequest = _CLASSES["GetStatusResponse"], _CLASSES["ContextRequest"]
ContainersRequest, CreateSessionRequest = _CLASSES["ContainersRequest"], _CLASSES["CreateSessionRequest"]
CreateSessionResponse, CloseSessionRequest = _CLASSES["CreateSessionResponse"], _CLASSES["CloseSessionRequest"]
