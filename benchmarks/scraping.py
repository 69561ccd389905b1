"""A scrape that is not older than its call: the daemon renders once a second, and shares the text."""

from __future__ import annotations

import re
import time
import urllib.request


def fresh_scrape(url: str, seconds: float) -> str:
    """Return the text of /metrics from after this call; raises `TimeoutError` when none comes in so many seconds."""
    began = time.time()
    while time.time() < began + seconds:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            text = str(answer.read().decode())
        taken = re.search(r"^membroker_scrape_time_seconds\S* (\S+)$", text, re.MULTILINE)
        if taken is not None and float(taken[1]) >= began:
            return text
        time.sleep(0.05)
    raise TimeoutError(f"{url} shows nothing newer in {seconds} seconds")
