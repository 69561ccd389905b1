"""Adapters: borrowed memory in the types of the frameworks, one module for each, which imports the framework itself.

Nothing is imported here: who uses one framework pays for no other. An adapter must never hand out an array without a
span of what it stands on (the method `span` of a buffer, a segment, a pool, a sparse array).
"""
