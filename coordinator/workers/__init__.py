"""Runs closures on the workers. `cluster.py` notices that a worker dies; `retry_rule.py` decides on its closures."""
