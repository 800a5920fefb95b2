"""The contestants: the same functions on the same kind of cluster, dispatched in different ways."""
