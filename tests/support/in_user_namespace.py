"""A daemon in a user namespace that maps this user alone: `-m tests.support.in_user_namespace` for `membrokerd`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.execvp("unshare", ["unshare", "-Ur", sys.executable, "-m", "membrokerd.cli", *sys.argv[1:]])
