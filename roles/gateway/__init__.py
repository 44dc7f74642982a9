"""The gateway: the policy as an HTTP endpoint that speaks OpenAI's and Anthropic's APIs. See docs/gateway.md."""
