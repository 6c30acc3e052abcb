"""GitHub issues, from GH Archive's events."""
