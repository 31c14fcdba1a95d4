"""emailrl: build a searchable mailbox, let a language model search it, and train that model by reinforcement learning."""

__version__ = "0.1.0"
