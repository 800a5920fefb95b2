"""Where a closure waits: the queue of closures, its state, and the workers that wait for one. No TensorFlow."""
