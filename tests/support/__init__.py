"""Helpers of the tests, one of each. A helper that one file alone uses stays in that file."""
