"""The commands by what they are for. Each module registers its own with the app; heavy imports happen inside them."""
