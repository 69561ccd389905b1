"""`python -m membroker` is the command `membroker`, of the interpreter that was named."""

import sys

from .cli import run

if __name__ == "__main__":
    sys.exit(run())
