"""From the shards of a Megatron-Core gang to the tensors of a Hugging Face model, in buckets of bounded size.

`layout` knows what each rank holds, `plan` which rank gives which rows for which bucket, both without a tensor at hand;
`assemble` cuts and puts together, `gather` does so over the ranks of a gang.
"""

from relax_rt.roles.training.resharding.layout import Division, Local, Naming, Target, naming_of, targets
from relax_rt.roles.training.resharding.plan import Bucket, Plan, Slice, plan_buckets

__all__ = [
    "Bucket",
    "Division",
    "Local",
    "Naming",
    "Plan",
    "Slice",
    "Target",
    "naming_of",
    "plan_buckets",
    "targets",
]
