"""Tests that the benchmarks run and report their figures."""
