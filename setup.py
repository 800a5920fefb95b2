"""Builds the distribution, which pyproject.toml describes."""

from setuptools import setup

setup()
