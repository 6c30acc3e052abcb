"""Parallelism: Lightning strategies, and plans that distribute the networks in place."""
