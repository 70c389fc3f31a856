"""One training job of two processes on CPUs: by Lowtide, and by others that spread a model over ranks."""
