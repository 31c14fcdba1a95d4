"""What all who ask a server share: when a request is made again, and how much of a reply is read."""
