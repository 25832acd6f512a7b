"""The shipped test kit: contracts, state machines, faults, clock."""
