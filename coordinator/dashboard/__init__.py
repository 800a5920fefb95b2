"""A page that shows what a strategy does, the same figures for Prometheus, and a server for both; no TensorFlow."""
