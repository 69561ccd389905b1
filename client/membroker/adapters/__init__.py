"""Adapters: borrowed memory in the types of the frameworks, one module for each.

This package imports nothing, and each module imports its framework when it is used, so a user of one framework does not
load the others. An adapter must never return an array without a span of the memory under it (the method `span` of a
buffer, a segment, a pool, a sparse array).
"""
