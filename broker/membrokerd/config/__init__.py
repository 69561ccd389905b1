"""What the operator sets: the configuration file, commanded quotas, and descriptor limits.

Every value is checked here, once, with a sentence that says what to write instead.
"""
