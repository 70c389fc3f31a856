"""`python -m lowtide`: the command, for environments whose scripts are not on the path."""

from __future__ import annotations

from lowtide.cli.main import app

if __name__ == "__main__":
    app(prog_name="lowtide")
