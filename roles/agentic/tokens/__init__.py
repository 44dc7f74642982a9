"""The token ledger: an episode is its tokens, as they were sampled."""

from relax_rt.roles.agentic.tokens.ledger import TokenLedger
from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.roles.agentic.tokens.types import (
    Branch,
    BranchTurn,
    Counts,
    Drift,
    Episode,
    Message,
    PromptPlan,
    Reasoning,
    Reply,
    Sampled,
    Tool,
)

__all__ = [
    "Branch",
    "BranchTurn",
    "ChatTemplate",
    "Counts",
    "Drift",
    "Episode",
    "Message",
    "PromptPlan",
    "Reasoning",
    "Reply",
    "Sampled",
    "TokenLedger",
    "Tool",
]
