"""The promises of a driver, one function each, by subject. Each function defined in these modules is a check.

A check calls what the contract has and nothing else, and starts processes of its own.
"""
