"""A page that shows what a strategy does, the same as numbers for Prometheus, and the server of both; no TensorFlow."""
