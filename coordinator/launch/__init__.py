"""Starts servers, clusters and programs: one server, a local cluster, a program in its roles, a Slurm task."""
