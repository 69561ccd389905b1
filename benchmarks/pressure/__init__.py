"""Three tenants on one GPU that want more than there is: which requests wait or are refused, and what growing costs.

The same trace runs on this tree with guarantees and recalls, on this tree first come, first served, and on another
tree if one is given.
"""
