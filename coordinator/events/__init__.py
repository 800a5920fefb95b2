"""The stream of events of a strategy, and the readers of this stream; no TensorFlow."""
