"""Memory that is mapped in this process: regions, what holds them, buffers, arrays, and a source without a broker.

It knows a lender by its contract (`lender`), and must never import a session, a segment or a pool.
"""
