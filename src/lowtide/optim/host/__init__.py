"""The update on the host: a C++ kernel, built at installation or first use."""
