"""The queue in which closures wait, the queue's state, and the workers that wait for closures. No TensorFlow."""
