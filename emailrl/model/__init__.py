"""The policy: resolving, loading and saving it (`load`), and the log-probabilities of its tokens (`logprobs`)."""
