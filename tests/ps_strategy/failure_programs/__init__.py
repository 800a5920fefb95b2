"""Whole programs whose cluster, or whose client, fails. Tests run each in a separate process."""
