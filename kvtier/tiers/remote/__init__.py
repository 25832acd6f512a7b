"""The remote tier: any connector behind a breaker, with what is known of its contents."""
