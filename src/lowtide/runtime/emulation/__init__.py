"""An emulated device: host memory that is counted and limited as a device's would be."""
