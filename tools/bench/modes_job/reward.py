"""A reward that differs within a group, so that every group would be trained on."""


def by_length(completion: str, answer: str, tokens: int) -> float:
    """0, 0.5 or 1."""
    return tokens % 3 / 2
