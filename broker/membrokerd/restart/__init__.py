"""How a daemon takes over from its predecessor: the journal, the descriptor store, its keeper, and the takeover.

It writes down facts and keeps descriptors. It must never decide what a tenant may have.
"""
