"""Who runs closures, and what happens when that fails: the cluster, its workers, retries, recovery. No TensorFlow."""
