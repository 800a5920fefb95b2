"""The version of this package. A build reads it without importing anything."""

__version__ = "0.1.0"
