"""A model's calibration made ahead of its traffic, and looked at: ``kvtier calibrate``."""
