"""Guests: programs that know nothing of membroker, and whose GPU memory is suspended as a whole.

`membroker run --guest` is the parent of such a program and holds its session. CUDA's driver takes all processes of the
program off the GPU and puts them back at the same addresses. A restore that meets a full GPU makes a process useless
forever, so the memory is borrowed before it.
"""
