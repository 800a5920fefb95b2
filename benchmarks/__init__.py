"""Programs that measure: each prints what it found, and none of them is part of the library."""
