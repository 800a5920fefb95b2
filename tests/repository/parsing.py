"""Parses Python sources while other threads may parse."""

import ast
import sys


def parse(source: str, filename: str = "<unknown>") -> ast.Module:
    """Parses a Python source; a SyntaxError names the file.

    Before Python 3.11.8, a call of `ast.parse` raises a SystemError if another thread parses at the same time, for
    example to print a traceback (https://github.com/python/cpython/issues/106905).
    """
    while True:
        try:
            return ast.parse(source, filename)
        except SystemError:
            if sys.version_info >= (3, 11, 8):
                raise
