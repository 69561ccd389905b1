"""What the broker costs, measured; RESULTS.md says what was seen, and where."""
