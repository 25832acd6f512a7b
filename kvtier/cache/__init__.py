"""Deciding and moving: sequence, planner (pure), executor, cache, worker."""
