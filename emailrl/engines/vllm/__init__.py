"""vLLM, in this process or on servers, proven to sample from the trainer's weights."""
