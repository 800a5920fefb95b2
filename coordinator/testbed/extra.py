"""What to say when a package is not installed that the test-bed needs and the library does not."""

from coordinator.errors import LaunchError


def missing(package: str) -> LaunchError:
    """An error that says how to install it."""
    return LaunchError(f"The test-bed needs {package}: pip install 'coordinator[testbed]'.")
