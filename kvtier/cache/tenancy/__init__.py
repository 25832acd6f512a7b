"""Whose chunks are: epochs, quotas, pins, wishes, and giving back what ended."""
