"""The RL roles of a run: rollout, reward, trainer, evaluator, and what they are made of."""

if __name__ != "relax_rt.roles":
    raise ImportError(f"import relax_rt.roles, not {__name__}: the short name belongs to your own code")
