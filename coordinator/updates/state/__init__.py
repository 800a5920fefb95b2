"""The state of update rules: on the parameter servers, and on the workers."""
