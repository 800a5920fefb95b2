"""Traces functions and calls them on workers. `tensorflow_internals/functions.py` sends them to the servers."""
