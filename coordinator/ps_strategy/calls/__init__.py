"""How a function call reaches a worker; `tensorflow_internals/process.py` has the function sent to the servers."""
