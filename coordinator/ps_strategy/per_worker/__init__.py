"""Objects of which each worker has its own copy: datasets, lookup tables, variables."""
