"""Updates: the user's optimizer by chunks, on the device and on the host."""
