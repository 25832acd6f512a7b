"""Admissions: what is worth a write to a tier that wears out. Pure bookkeeping, as policies are."""
