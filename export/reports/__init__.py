"""What became of every attention: text, JSON, page, and the story of one node."""
