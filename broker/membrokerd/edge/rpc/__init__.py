"""The gRPC servers: one for each tenant's endpoint and one for the operator.

Services read a message, make an event, await the outcome and convert it. They must never touch the books.
"""
