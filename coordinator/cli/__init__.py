"""The commands: `coordinator run`, `serve`, `simulate` and `testbed`."""
