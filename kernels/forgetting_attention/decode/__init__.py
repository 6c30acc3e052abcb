"""Forgetting attention of one token or a few against a cache, split over the keys."""
