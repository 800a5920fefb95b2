"""Objects with a copy on each worker: datasets, lookup tables, variables."""
