"""`python -m probe_cli`."""

from __future__ import annotations

from probe_cli.cli.main import run

if __name__ == "__main__":
    run()
