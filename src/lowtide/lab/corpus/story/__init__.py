"""The generator of short stories: its words are in `text`, its rules and facts in the modules here."""

from __future__ import annotations
