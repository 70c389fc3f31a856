"""Measure updates on the host and on the device."""
