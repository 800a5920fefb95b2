"""Tests of sidecar evaluation: one process, tiny models, no cluster."""
