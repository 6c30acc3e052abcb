"""The kernels of selective attention: scores of all keys, then the choice and its values."""
