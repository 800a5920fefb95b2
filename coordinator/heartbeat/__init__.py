"""Reports which servers answer, and ends calls to servers that do not. Loads no TensorFlow.

The client uses `Heartbeat`. It starts a `HeartbeatProcess`, passes it the client's connections (`OpenConnections`), and
receives each server's state (`ServerState`). `TaskProbe` asks one server once. `listening.py` decides at which
addresses a server of this process is reached.
"""
