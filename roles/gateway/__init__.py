"""The gateway: the policy as an HTTP endpoint that speaks OpenAI's and Anthropic's APIs. See docs/guides/gateway.md."""
