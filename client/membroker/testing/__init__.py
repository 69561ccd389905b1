"""The conformance suite that every driver must pass: `check_driver`, and `check_two_devices` for a pair of devices.

It knows the driver contract alone, and must never import the rest of the library.
"""

from .driver_suite import CHECKS, TWO_DEVICE_CHECKS, MakeDriver, check_driver, check_two_devices, wait_until

__all__ = ["CHECKS", "TWO_DEVICE_CHECKS", "MakeDriver", "check_driver", "check_two_devices", "wait_until"]
