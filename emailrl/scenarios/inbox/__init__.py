"""An inbox in memory, as both generators of questions read it: its mails, people, topics and stated facts."""
