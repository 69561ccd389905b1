"""Compare the releases of inference engines with what membroker relies on in them: `python -m tools.engines`.

`releases` fetches their source from the package index, `sources` reads it, and `__main__` judges and prints.
"""
