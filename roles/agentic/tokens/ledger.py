"""The single truth of an episode."""

from __future__ import annotations

from collections.abc import Sequence

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import Drift, Episode, Message, PromptPlan, Reasoning, Reply, Sampled, Tool


class TokenLedger:
    """The single truth of an episode: what was sampled, on what, and what of it is trained. Pure; not thread-safe.

    Args:
        session: begins the ids of replies.
        max_tokens: of all branches together, shared context counted in each, as `episode` gives them.
        max_branches: branches at most.
    """

    def __init__(
        self,
        chat: ChatTemplate,
        *,
        max_tokens: int,
        max_branches: int = 64,
        drift: Drift = "fork",
        reasoning: Reasoning = "keep_reasoning",
        session: str = "session",
    ) -> None:
        raise NotImplementedError

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        previous: str | None = None,
        n: int = 1,
        max_new_tokens: int | None = None,
    ) -> PromptPlan:
        """The tokens that the next completion is sampled on.

        Args:
            messages: the whole conversation, as the caller has it.
            previous: id of the reply that it goes on from; else that is found by what was said.
            n: completions wanted.
            max_new_tokens: of each; so many tokens of the budget are held until they come. None: holds none.

        Raises:
            Refused: a budget is used up, `previous` is not known, or the template takes no such conversation. Nothing
                is changed then.
        """
        raise NotImplementedError

    def sampled(self, plan: PromptPlan, what: Sampled) -> Reply:
        """Record a completion; `plan.n` times at most (more than once: siblings).

        Raises:
            Refused: it does not fit (lengths, versions, finish reason, room), or the call is over.
        """
        raise NotImplementedError

    def abandon(self, plan: PromptPlan) -> None:
        """The call was cancelled: what was sampled for it is not trained, and what still comes is refused."""
        raise NotImplementedError

    def conversation(self, response: str) -> list[Message]:
        """The messages up to and with a reply, to which new ones can be added for `prompt(..., previous=response)`.

        Raises:
            Refused: there is no such reply.
        """
        raise NotImplementedError

    def episode(self) -> Episode:
        """What is to be trained, as it stands now; open calls are not part of it."""
        raise NotImplementedError
