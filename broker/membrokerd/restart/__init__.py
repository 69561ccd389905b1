"""What lets a successor go on: the journal, the descriptor store and its keeper, and the takeover at a start.

It must never decide what a tenant may have; it writes down facts and keeps descriptors.
"""
