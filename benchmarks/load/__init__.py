"""`make bench`: the load figures of the broker on the host driver, beside the bare work that it stands on.

`scenes` and `recalls` say what is measured, `stage` how much and in which turns, `crew` runs processes that do `jobs`,
`bare` is the work without a broker, `daemon` the broker, `core` its core alone, `figures` the arithmetic, `targets`
what should be reached, `report` what a person reads. It starts all that it measures, in a temporary directory, and must
never touch a daemon that it did not start. No figure here is ever a pass or a failure.
"""
