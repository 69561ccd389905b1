"""`make bench`: the load figures of the broker on the host driver, beside the bare work that it stands on.

`scenes` and `recalls` say what is measured, `jobs` what processes do, `bare` is the work without a broker, `core` the
broker's core alone, `figures` the rows, `targets` what should be reached. No figure here is ever a pass or a failure.
"""
