"""From logits to tokens: penalties, filters, seeded randomness, log-probabilities."""
