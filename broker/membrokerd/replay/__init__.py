"""`membroker replay`: the recorder, the format of its trace, and a trace once more through the core with other numbers.

Only the recorder runs in a daemon, and it must never change what the core decides.
"""
