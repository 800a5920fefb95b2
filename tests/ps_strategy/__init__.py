"""Tests of the strategy, over real TensorFlow servers."""
