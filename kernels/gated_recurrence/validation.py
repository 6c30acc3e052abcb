def check_values(k, log_decay, cu_seqlens): pass
