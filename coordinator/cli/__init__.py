"""The commands of `coordinator`, one module for each or for a few."""
