"""Ranks: what several processes that train one model tell each other. It knows nothing of sessions."""
