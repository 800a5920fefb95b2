"""Several calls run as one, and their messages packed."""
