"""Images for models that take them: decoded, turned into tokens by the model's processor, and embedded."""
