"""An inbox in memory for both question generators: its emails, people, topics and stated facts."""
