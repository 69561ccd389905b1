"""What people and monitoring see: logs, metrics and their server, suspects, systemd's notifications.

It reads snapshots and must never change the books or wait on the event loop.
"""
