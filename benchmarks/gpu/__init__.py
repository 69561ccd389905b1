"""`make bench-gpu`: what a borrowed extent costs, beside the same work done by the driver in process, in one run.

`scenes` says what is measured and `targets` what it should be, `stage` measures, `works` are the calls that are timed,
`bare` is the driver without a broker, `daemon` the broker and its histograms, `crew` many processes, `figures` the
arithmetic, `report` and `plot` what a person reads. It starts all that it measures, in temporary directories, and must
never touch a daemon that it did not start. No figure here is ever a pass or a failure.
"""
