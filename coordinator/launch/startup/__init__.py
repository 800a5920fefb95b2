"""The first folder on the PYTHONPATH of the programs that `coordinator run` starts: Python runs its module."""
