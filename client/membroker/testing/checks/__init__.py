"""The promises of a driver, one function each, by subject. Only `driver_suite` imports them.

A check calls what the contract has and nothing else, and starts processes of its own.
"""
