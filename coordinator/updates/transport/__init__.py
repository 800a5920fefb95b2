"""Gradients and variables on their way between workers and parameter servers."""
