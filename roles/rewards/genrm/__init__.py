"""The generative judge: a pool of engines, frozen or at the policy's weights, that answer what reward workers ask."""
