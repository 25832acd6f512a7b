"""Kernels: a folder per operation (checked entry, Triton, reference); imports torch, never kvtier."""
