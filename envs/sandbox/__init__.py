"""Where a tool's commands run: one contract, and an implementation for each kind of isolation."""
