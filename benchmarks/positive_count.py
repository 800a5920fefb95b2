"""A whole number of at least 1, as an argument on the command line."""

import argparse


def positive_count(text: str) -> int:
    """The number that `text` is; for `type=` of `argparse`.

    Raises:
      ValueError: it is no whole number.
      argparse.ArgumentTypeError: it is less than 1.
    """
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count
