"""Memory that is mapped in this process: regions, their lifetime, buffers, arrays, and a source without a broker.

It knows a lender by its contract (`lender`), and must never import a session, a segment or a pool.
"""
