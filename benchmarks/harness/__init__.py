"""What the benchmarks share: machine and daemon, processes that work, turns, samples, goals, and what a person reads.

It knows no benchmark, and imports CUDA, torch and matplotlib where they are used. It starts all that it measures, in
temporary directories, and must never touch a daemon that it did not start.
"""
