"""A managed step as a trace sees it: the session's own passes over weights without memory."""
