"""Models that join past and new keys by Concat, made into models with caches and lengths."""
