"""The benchmarks run, and say what they found."""
