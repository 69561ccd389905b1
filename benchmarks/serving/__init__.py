"""Several vLLM engines on one GPU: static parts of the memory beside membroker's, under load that moves between models.

`traces`, `figures` and `summary` are pure, and `recorded` reads what real services were asked. `client` runs in a
process of its own for each model, `run` starts and ends processes, and `report` and `plot` show what was measured.
"""
