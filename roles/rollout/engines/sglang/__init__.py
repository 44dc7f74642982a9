"""A real SGLang server as an engine: a supervised child of the role, reached over HTTP."""
