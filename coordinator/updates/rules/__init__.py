"""The update rules. A new rule is a subclass here of `UpdateRule` or another rule, with settings in `settings.py`."""
