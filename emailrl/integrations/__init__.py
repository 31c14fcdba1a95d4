"""The agent where its users already are. Each file is an adapter around what exists, imported only when asked for."""
