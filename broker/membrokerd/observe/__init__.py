"""What people and monitoring see: metrics and their server, the status page, the history behind its charts.

It reads snapshots and must never change the books or wait on the event loop.
"""
