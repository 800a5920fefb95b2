"""Tests of workers with several devices, each of which is a replica."""
