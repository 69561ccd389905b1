"""The device that this daemon owns: how much of it may be lent, every driver call, and which processes use it.

Driver calls happen here and nowhere else. Whether memory is lent is decided in the core.
"""
