"""The reward of the run."""


def score(completion: str, answer: str, finish_reason: str) -> float:
    """1 for the right sum and nothing else, ended by itself."""
    return float(finish_reason == "stop" and completion.strip() == answer)
