"""What a session did: copies, phases, peaks, as plain data."""
