"""The token ledger: an episode is its tokens, as they were sampled."""
