"""The update rules, one file per rule."""
