"""What if: replays request traces against eviction policies, codecs and capacities, offline."""
