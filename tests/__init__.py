"""The tests, which mirror `coordinator/` name for name, and what they share."""
