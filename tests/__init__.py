"""membroker's tests. They mirror the source; `system/` has whole stories with real processes."""
