"""The in-process engine: continuous batching over a key-value cache in blocks, in plain torch."""
