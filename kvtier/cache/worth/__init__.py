"""What is worth loading: what tiers and computing cost, measured, and what follows."""
