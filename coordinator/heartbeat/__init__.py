"""Which servers answer, and an end to the calls to those that do not.

`Heartbeat` is what the client uses: it starts `HeartbeatProcess`, passes it the connections of the client
(`OpenConnections`), and hears from it how the servers are (`Pulse`). `TaskProbe` asks one server, once. No TensorFlow.
"""
