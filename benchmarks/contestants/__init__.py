"""Those that are compared: the same functions on the same kind of cluster, each dispatched in a way of its own."""
