"""A membrokerd without the `--log-level debug` that tests start every daemon with: the file alone decides."""

from __future__ import annotations

import sys

from membrokerd.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:-2]))
