"""Forgetting attention in Gluon for Hopper: warp-specialized forward and backward."""
