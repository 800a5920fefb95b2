"""How a function call reaches a worker: tracing, caching of traces, running, and classifying failures."""
