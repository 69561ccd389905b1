"""`make bench-gpu`: what a borrowed extent costs, beside the same work done by the driver in process, in one run.

`scenes` says what is measured and `targets` what it should be, `works` are the calls that are timed and the daemons
that they ask, `bare` is the driver without a broker, `figures` the arithmetic, `report` and `plot` what a person reads.
No figure here is ever a pass or a failure.
"""
