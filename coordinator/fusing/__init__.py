"""How many closures run in one call. No TensorFlow."""
