"""Channels and messages of the requests that this library itself makes to TensorFlow's servers, without TensorFlow.

The messages are described by the few fields that are used here. They are part of TensorFlow's wire format
(`worker.proto`, `device_attributes.proto`, `eager_service.proto`), which does not change between releases; TensorFlow
comes without Python classes for the last of these. They are registered in a separate pool, since TensorFlow registers
messages of the same names in the default one.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

GET_STATUS = "/tensorflow.WorkerService/GetStatus"
KEEP_ALIVE = "/tensorflow.eager.EagerService/KeepAlive"
CLOSE_CONTEXT = "/tensorflow.eager.EagerService/CloseContext"
CLEANUP_ALL = "/tensorflow.WorkerService/CleanupAll"

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


def _message_classes() -> tuple[Any, Any, Any]:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="coordinator/server_rpcs.proto", package="coordinator")

    def add_message(message_name: str, **fields: tuple[int, int]) -> Any:
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            message.field.add(name=field_name, number=number, type=kind, label=field.LABEL_OPTIONAL)
        return message

    add_message("DeviceAttributes", name=(1, field.TYPE_STRING), incarnation=(6, field.TYPE_FIXED64))
    [devices] = add_message("GetStatusResponse", device_attributes=(1, field.TYPE_MESSAGE)).field
    devices.type_name, devices.label = ".coordinator.DeviceAttributes", field.LABEL_REPEATED
    add_message("ContextRequest", context_id=(1, field.TYPE_FIXED64), context_view_id=(2, field.TYPE_FIXED64))
    [containers] = add_message("ContainersRequest", container=(1, field.TYPE_STRING)).field
    containers.label = field.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = "GetStatusResponse", "ContextRequest", "ContainersRequest"
    found = (pool.FindMessageTypeByName(f"coordinator.{name}") for name in names)
    status, context, containers = map(message_factory.GetMessageClass, found)
    return status, context, containers


# `ContextRequest` is what both KeepAlive and CloseContext take, `ContainersRequest` what CleanupAll takes.
GetStatusResponse, ContextRequest, ContainersRequest = _message_classes()
