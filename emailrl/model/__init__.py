"""The policy (`policy`): resolving and loading it (`load`), and the log-probabilities of its tokens (`logprobs`)."""
