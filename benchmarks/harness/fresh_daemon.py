"""membrokerd with a new /metrics for each scrape, for a benchmark that scrapes before and after each measurement.

The daemon shares one text for a second. Waiting for the next one took two seconds of each measurement.
"""

from __future__ import annotations

import sys

from membrokerd import cli
from membrokerd.observe import cached_text as kept

if __name__ == "__main__":
    kept.KEPT_SECONDS = 0.0
    sys.exit(cli.main())
