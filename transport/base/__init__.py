"""What queue, weights and compat share: journal, numbered and waiting calls, watched processes, versions, user code."""
