"""The config of an RL run: its tables together, and the checks across them."""
