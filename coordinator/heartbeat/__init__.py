"""Which servers answer; calls to those that do not are ended.

`Heartbeat` is what the client uses: it starts `HeartbeatProcess`, passes it the connections of the client
(`OpenConnections`), and receives from it the state of each server (`ServerState`). `TaskProbe` asks one server, once.
`listening.py` says at which addresses a server of this process is reached. It loads no TensorFlow.
"""
