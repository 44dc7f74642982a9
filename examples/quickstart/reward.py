"""The quickstart's reward: a bare number that ends by itself, near the right one, and the right one."""

FORMAT, NEAR, RIGHT = 0.2, 0.3, 0.5


def score(completion: str, answer: str, finish_reason: str = "stop") -> dict[str, float]:
    """Components: `format` for a bare integer, `near` up to 0.3 the closer it is, `right` for the answer itself.

    Without `near` the model may soon write only one-digit numbers: the shortest way to a well-formed answer, and
    never right.
    """
    text = completion.strip()
    if finish_reason != "stop" or not text.isascii() or not text.isdigit() or len(text) > 6:
        return {"format": 0.0, "near": 0.0, "right": 0.0}
    expected, value = int(answer), int(text)
    near = max(0.0, 1 - abs(value - expected) / max(10, abs(expected)))
    return {"format": FORMAT, "near": NEAR * near, "right": RIGHT * (value == expected)}
