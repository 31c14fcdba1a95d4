"""Shared parts of server clients: when to retry a request, and how much of a reply to read."""
