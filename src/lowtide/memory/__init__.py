"""Where bytes live: tiers, groups, chunks, pools, movement and eviction. Knows nothing of training."""
