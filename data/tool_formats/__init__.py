"""How a family of models writes its tool calls, and how they are read."""
