"""What lies below DRAM: bringing up from disk and remotes, and writing to them."""
