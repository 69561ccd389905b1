"""Everything that bytes from outside pass: messages to events, results to messages, errors to sentences.

It translates and bounds; it must never decide who gets memory. `handoff` and `rpc` are the two ways in.
"""
