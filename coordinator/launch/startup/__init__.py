"""The first folder on the PYTHONPATH of programs that `coordinator run` starts. Python runs its `sitecustomize`."""
