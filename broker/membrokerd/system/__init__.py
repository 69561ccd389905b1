"""What the daemon asks of the operating system: its directory, small files, processes, the log, the loop's turns.

Nothing here knows memory, tenants or a driver. It stands on the standard library, and on the core's words for the log.
"""
