"""Programs in which servers or the client fail. Tests run each of them in a separate process."""
