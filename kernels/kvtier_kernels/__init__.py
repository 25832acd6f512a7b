"""Kernels: a folder per operation (checked entry, Triton, reference); torch, never kvtier."""
