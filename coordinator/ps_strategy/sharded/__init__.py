"""Variables whose rows are on several parameter servers."""
