"""The ablations of DiffQKV at small scale: which runs, their results, and the report beside the paper's numbers."""
