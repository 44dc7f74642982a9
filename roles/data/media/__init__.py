"""Pictures for models that see: taken from messages, turned into tokens by the model's own processor, and computed."""
