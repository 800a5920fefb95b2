"""Runs pytest on the paths given as arguments: the entry point of the test targets in BUILD."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
