"""What happens while a strategy runs, as one stream of events, and those that read it; no TensorFlow."""
