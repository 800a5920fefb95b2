"""Reports which servers answer, and ends calls to servers that do not answer. Loads no TensorFlow.

The client uses `Heartbeat`, which starts a `HeartbeatProcess`, passes the client's connections to this process
(`OpenConnections`), and receives each server's state (`ServerState`). `TaskProbe` asks one server once. `listening.py`
decides at which addresses a server of this process is reached.
"""
