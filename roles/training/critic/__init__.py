"""The critic: values of tokens for advantages such as gae, trained beside the policy on the returns of each step."""
